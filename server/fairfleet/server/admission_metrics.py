"""What admission decided, counted since the server's start: how many updates passed each check, and what others met.

Form, finiteness and report are checked when an update arrives, and one that fails is refused there; norm, loss and
samples when its round is aggregated.
"""

from __future__ import annotations

from collections import Counter

from prometheus_client.core import CounterMetricFamily

from fairfleet.proto.v1 import operator_pb2 as pb
from fairfleet.server.admission import Admission
from fairfleet.server.traffic import Traffic

ARRIVAL = ("form", "finite", "report")
DECISIONS = {
    **dict.fromkeys(ARRIVAL, ("passed", "rejected")),
    "norm": ("passed", "observed", "clipped", "rejected"),
    "loss": ("passed", "observed", "winsorised", "rejected"),
    "samples": ("passed", "observed", "capped"),
}


class AdmissionTally:
    def __init__(self, settings: Admission) -> None:
        self._off = {check for check in ("norm", "loss", "samples") if getattr(settings, check) == "off"}
        self._counts: Counter[tuple[str, str]] = Counter()

    def received(self) -> None:
        """An update is whole: what is checked as it arrives is right."""
        self._counts.update((check, "passed") for check in ARRIVAL)

    def committed(self, record: pb.RoundRecord) -> None:
        own = [one for one in record.admission if not one.stood_in]
        judged = {part.client for part in record.contributions} | {one.client for one in own}
        self._counts.update((one.check, one.decision) for one in record.admission)
        for check in {"norm", "loss", "samples"} - self._off:
            self._counts[check, "passed"] += len(judged - {one.client for one in own if one.check == check})

    def family(self, traffic: Traffic) -> CounterMetricFamily:
        about = "Updates, and rows that stand for absent clients, by what a check of them decided"
        found = CounterMetricFamily("fairfleet_admission", about, labels=["check", "decision"])
        for check, decisions in DECISIONS.items():
            for decision in decisions:
                refused = traffic.refusals[check] if decision == "rejected" else 0
                found.add_metric([check, decision], self._counts[check, decision] + refused)
        return found
