"""What is kept of a committed round: whose updates, what the step promised, and all that was measured."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from fairfleet.common.reports import TrainReport
from fairfleet.common.tensors import Model
from fairfleet.common.wire import report_out
from fairfleet.proto.v1 import operator_pb2 as pb
from fairfleet.server.admission import Finding
from fairfleet.server.conflict_map import MOST_CLIENTS
from fairfleet.server.diagnostics import Diagnostics
from fairfleet.server.store import StoredUpdate

Updates = Mapping[str, tuple[StoredUpdate, Model]]
ELSEWHERE = frozenset(  # what is not sent, or not as it is recorded
    (
        "digest",
        "contributions",
        "diagnostics",
        "history_evicted",
        "measured",
        "verification",
        "cut_off",
        "admission",
        "privacy",
    )
)


def record_of(round: int, digest: bytes, updates: Updates, diagnostics: Diagnostics) -> dict[str, Any]:
    told = diagnostics.model_dump(mode="json")
    if len(updates) > MOST_CLIENTS:
        told["client_cosines"] = []
    return {
        "round": round,
        "digest": digest.hex(),
        "contributions": [
            {"client": client, "weight": weight(diagnostics, client), "report": update.report.model_dump()}
            for client, (update, _) in updates.items()
        ],
        "promised": promised(diagnostics),
        "diagnostics": told,
        "unix_seconds": time.time(),
    }


def admission_record(findings: Sequence[Finding]) -> dict[str, Any]:
    """What was out of the ordinary; of most rounds nothing, and then nothing is kept."""
    return {"admission": [asdict(one) for one in findings]} if findings else {}


def promised(diagnostics: Diagnostics) -> float | None:
    """The share of clients whose loss falls to first order, should the model move a little along the rule's direction.

    Whether it fell is another question: a step has a length, and an optimizer may turn it.
    """
    slopes = list(diagnostics.predicted_decrease.values())
    return sum(slope > 0 for slope in slopes) / len(slopes) if slopes else None


def weight(diagnostics: Diagnostics, client: str) -> float:
    """The client's coefficient; the mean over the layers where each has its own; 0 where a rule has none."""
    return float(np.mean(diagnostics.coefficients.get(client, 0.0)))


def record_out(record: dict[str, Any], diagnostics_json: str | None = None) -> pb.RoundRecord:
    """As it is sent; `diagnostics_json` where they have been written out before."""
    plain = {key: value for key, value in record.items() if key not in ELSEWHERE}
    contributions = [
        pb.ClientContribution(client=c["client"], weight=c["weight"], report=report_out(TrainReport(**c["report"])))
        for c in record["contributions"]
    ]
    return pb.RoundRecord(
        digest=bytes.fromhex(record["digest"]),
        contributions=contributions,
        diagnostics_json=json.dumps(record["diagnostics"]) if diagnostics_json is None else diagnostics_json,
        measured=pb.Measured(**record["measured"]) if record.get("measured") else None,
        verification=pb.Verification(**record["verification"]) if record.get("verification") else None,
        cut_off=[pb.CutOff(**one) for one in record.get("cut_off", ())],
        admission=[pb.AdmissionFinding(**one) for one in record.get("admission", ())],
        **plain,
    )
