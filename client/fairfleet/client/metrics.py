"""A client's numbers for Prometheus, on a port of its own, if it is told to: see docs/metrics.md."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from fairfleet.client.settings import host_and_port
from fairfleet.client.telemetry import Telemetry
from fairfleet.common.errors import UsageError

OUTCOMES = ("counted", "history", "ignored")


def serve(telemetry: Telemetry, name: str, listen: str) -> str:
    """Answers at this host:port from now on, in a thread of its own; says where."""
    host, port = host_and_port(listen) or ("", -1)  # the settings have looked at it
    registry = CollectorRegistry()
    registry.register(Agent(telemetry, name))
    try:
        server, _ = start_http_server(port, host, registry)
    except OSError as error:
        raise UsageError(f"cannot serve metrics on {listen}: {error.strerror}. Give another --metrics.") from error
    return f"http://{f'[{host}]' if ':' in host else host}:{server.server_port}/metrics"


class Agent(Collector):
    def __init__(self, telemetry: Telemetry, name: str) -> None:
        self._telemetry, self._name = telemetry, name

    def collect(self) -> Iterator[Metric]:
        told = self._telemetry
        yield InfoMetricFamily("fairfleet_agent", "Who this is", {"client": self._name, "device": told.device})
        moved = CounterMetricFamily("fairfleet_agent_transferred_bytes", "Models in, updates out", labels=["direction"])
        moved.add_metric(["received"], told.received_bytes)
        moved.add_metric(["sent"], told.sent_bytes)
        yield moved
        yield CounterMetricFamily("fairfleet_agent_retries", "Calls that failed and were made again", told.retries)
        yield CounterMetricFamily("fairfleet_agent_steps", "Local training steps", told.steps)
        yield CounterMetricFamily("fairfleet_agent_task_failures", "Trainings that failed", told.failures)
        updates = CounterMetricFamily("fairfleet_agent_updates", "What the server said of updates", labels=["outcome"])
        for outcome in OUTCOMES:
            updates.add_metric([outcome], told.updates[outcome])
        yield updates
        yield from self._training()
        yield from self._evaluation()

    def _training(self) -> Iterator[Metric]:
        report = self._telemetry.training
        if report is None:
            return
        losses = GaugeMetricFamily("fairfleet_agent_training_loss", "Of the newest training", labels=["when"])
        losses.add_metric(["before"], report.loss_before)
        losses.add_metric(["after"], report.loss_after)
        yield losses
        yield GaugeMetricFamily("fairfleet_agent_training_seconds", "How long it took", report.seconds)
        if report.seconds:
            pace = report.steps / report.seconds
            yield GaugeMetricFamily("fairfleet_agent_steps_per_second", "How fast it was", pace)

    def _evaluation(self) -> Iterator[Metric]:
        found = self._telemetry.evaluation
        if found is None:
            return
        yield GaugeMetricFamily("fairfleet_agent_loss", "Of the newest evaluation, on the own test data", found.loss)
        if found.accuracy is not None:
            yield GaugeMetricFamily("fairfleet_agent_accuracy_ratio", "Of the same", found.accuracy)
