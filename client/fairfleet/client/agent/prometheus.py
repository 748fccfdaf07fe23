"""A client's own metrics for Prometheus, on a separate port; see docs/reference/metrics.md.

They are served only with `--metrics`. The module needs prometheus-client.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from fairfleet.client.agent.counters import ClientCounters
from fairfleet.client.settings import host_and_port
from fairfleet.common.errors import UsageError

# The label of a training's loss before it, by how it was measured.
BEFORE = {"exact": "before", "sampled": "before_sampled", "batches": "first_pass"}
OUTCOMES = ("counted", "history", "ignored")
EVALUATED = {
    "loss": (
        "fairfleet_agent_loss",
        "Loss of the newest evaluation, on this client's test data",
    ),
    "accuracy": (
        "fairfleet_agent_accuracy_ratio",
        "Accuracy of the newest evaluation, on this client's test data",
    ),
}


def serve(counters: ClientCounters, name: str, listen: str) -> str:
    """Serve the metrics at this host:port in a thread, and return the URL.

    Raises UsageError if the port cannot be used.
    """
    host, port = host_and_port(listen) or ("", -1)  # the settings have checked the form
    registry = CollectorRegistry()
    registry.register(AgentCollector(counters, name))
    try:
        server, _ = start_http_server(port, host, registry)
    except OSError as error:
        raise UsageError(
            f"cannot serve metrics on {listen}: {error.strerror}. Give another --metrics."
        ) from error
    return f"http://{f'[{host}]' if ':' in host else host}:{server.server_port}/metrics"


class AgentCollector(Collector):
    """Converts a client's counters into metric families on every scrape."""

    def __init__(self, counters: ClientCounters, name: str) -> None:
        self._counters, self._name = counters, name

    def collect(self) -> Iterator[Metric]:
        """Yield all metric families with their present values."""
        yield InfoMetricFamily(
            "fairfleet_agent",
            "Name and device of this client",
            {"client": self._name, "device": self._counters.device},
        )
        yield from self._transfers()
        yield CounterMetricFamily(
            "fairfleet_agent_steps", "Local training steps", self._counters.steps
        )
        yield CounterMetricFamily(
            "fairfleet_agent_task_failures", "Trainings that failed", self._counters.failures
        )
        yield from self._training()
        yield from self._evaluation()

    def _transfers(self) -> Iterator[Metric]:
        transferred = CounterMetricFamily(
            "fairfleet_agent_transferred_bytes",
            "Bytes of models received and of updates sent",
            labels=["direction"],
        )
        transferred.add_metric(["received"], self._counters.received_bytes)
        transferred.add_metric(["sent"], self._counters.sent_bytes)
        yield transferred
        yield CounterMetricFamily(
            "fairfleet_agent_retries",
            "Calls that failed and were made again",
            self._counters.retries,
        )
        updates = CounterMetricFamily(
            "fairfleet_agent_updates", "Updates by the server's decision", labels=["outcome"]
        )
        for outcome in OUTCOMES:
            updates.add_metric([outcome], self._counters.updates[outcome])
        yield updates

    def _training(self) -> Iterator[Metric]:
        report = self._counters.training
        if report is None:
            return
        losses = GaugeMetricFamily(
            "fairfleet_agent_training_loss",
            "Loss before and after the newest training",
            labels=["when"],
        )
        losses.add_metric([BEFORE[report.loss_measurement]], report.loss_before)
        if report.loss_after is not None:
            losses.add_metric(["after"], report.loss_after)
        yield losses
        yield GaugeMetricFamily(
            "fairfleet_agent_training_seconds", "Duration of the newest training", report.seconds
        )
        if report.seconds:
            yield GaugeMetricFamily(
                "fairfleet_agent_steps_per_second",
                "Speed of the newest training",
                report.steps / report.seconds,
            )

    def _evaluation(self) -> Iterator[Metric]:
        evaluation = self._counters.evaluation
        if evaluation is None:
            return
        for name, (metric, about) in EVALUATED.items():
            value = evaluation.figure(name)
            if value is not None:
                yield GaugeMetricFamily(metric, about, value)
        if evaluation.measures:
            about = "Measures of the task's own of the newest evaluation"
            measures = GaugeMetricFamily("fairfleet_agent_measure", about, labels=["measure"])
            for name, measure in evaluation.measures.items():
                measures.add_metric([name], measure.value)
            yield measures
