"""One round's aggregation: admission, history of absent clients, rule, buffers, diagnostics."""

from fairfleet.server.aggregation.admission import AdmissionContext, AdmissionSettings
from fairfleet.server.aggregation.aggregator import Aggregation, aggregate
from fairfleet.server.aggregation.diagnostics import Diagnostics
from fairfleet.server.aggregation.history import History, HistorySettings
from fairfleet.server.aggregation.results import AggregatedStep, Outcome, ServerState

__all__ = [
    "AdmissionContext",
    "AdmissionSettings",
    "AggregatedStep",
    "Aggregation",
    "Diagnostics",
    "History",
    "HistorySettings",
    "Outcome",
    "ServerState",
    "aggregate",
]
