"""What a client counts of its own work. Plain numbers: whether anybody asks for them is another matter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from fairfleet.common.reports import Evaluation, TrainReport


@dataclass
class Telemetry:
    device: str = ""
    received_bytes: int = 0
    sent_bytes: int = 0
    retries: int = 0  # calls that failed and were made again
    steps: int = 0  # of local training, all in all
    updates: Counter[str] = field(default_factory=Counter)  # by what the server said of them
    failures: int = 0  # of the task
    training: TrainReport | None = None  # the newest
    evaluation: Evaluation | None = None  # the newest

    def trained(self, report: TrainReport) -> None:
        self.training = report
        self.steps += report.steps

    def counting_received(self, messages: Iterable[bytes]) -> Iterator[bytes]:
        for message in messages:
            self.received_bytes += len(message)
            yield message

    def counting_sent(self, messages: Iterable[bytes]) -> Iterator[bytes]:
        for message in messages:
            self.sent_bytes += len(message)
            yield message
