"""The numbers that a client counts about its own work.

They are plain attributes. `prometheus` serves them if the owner of the machine wants that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from fairfleet.common.reports import Evaluation, TrainReport


@dataclass
class ClientCounters:
    """Counts since the start of the process, and the newest reports."""

    device: str = ""
    received_bytes: int = 0
    sent_bytes: int = 0
    retries: int = 0  # calls that failed and were made again
    steps: int = 0  # of local training, in total
    updates: Counter[str] = field(default_factory=Counter)  # by the outcome in the receipt
    failures: int = 0  # of the task
    training: TrainReport | None = None  # the newest
    evaluation: Evaluation | None = None  # the newest

    def record_training(self, report: TrainReport) -> None:
        """Store the report of a training and count its steps."""
        self.training = report
        self.steps += report.steps

    def counting_received(self, messages: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the messages and count their bytes as received."""
        for message in messages:
            self.received_bytes += len(message)
            yield message

    def counting_sent(self, messages: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the messages and count their bytes as sent."""
        for message in messages:
            self.sent_bytes += len(message)
            yield message
