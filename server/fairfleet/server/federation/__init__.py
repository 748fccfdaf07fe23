"""The running federation: state in memory that ties rounds, storage and transfer together."""

from fairfleet.server.federation.clients.sessions import ClientDescription, Session
from fairfleet.server.federation.coordinator import Coordinator
from fairfleet.server.federation.federation_state import FederationState
from fairfleet.server.federation.receipts import Receipt

__all__ = ["ClientDescription", "Coordinator", "FederationState", "Receipt", "Session"]
