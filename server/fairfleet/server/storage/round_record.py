"""The record of a committed round, stored as JSON in the table `rounds`.

Some fields become known only in later rounds; they have tables of their own and are added when
records are read. Records of earlier versions lack fields that did not exist yet: those have the
defaults of the classes here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from fairfleet.common.reports import TrainReport
from fairfleet.common.training_plan import LossMeasurement
from fairfleet.server.aggregation.admission import AdmissionFinding

# Left out of the JSON while they are empty, and read from other tables.
OPTIONAL_FIELDS = ("surplus", "privacy", "admission", "verification", "settings_digest")
LATER_FIELDS = ("measured", "cut_off", "undone")


@dataclass(frozen=True)
class Contribution:
    """One client's part in a round."""

    client: str
    weight: float  # the coefficient of its update
    report: TrainReport


@dataclass(frozen=True)
class VerificationRecord:
    """How the participants tried a step before it was taken; see the message `Verification`."""

    outcome: str
    reason: str
    factor: float
    improved: tuple[float, ...] = ()
    answered: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    seconds: float = 0.0
    tried: tuple[float, ...] = ()


@dataclass(frozen=True)
class PrivacyRelease:
    """Where noise was added to what a round released, and whether its clients were sampled."""

    where: str
    drawn: bool


@dataclass(frozen=True)
class StepImprovement:
    """The share of clients whose loss did not rise by a step (ρ), and of those whose loss fell.

    Only clients with reports before and after count. Servers before 0.2.0 recorded one share, of
    the clients whose loss fell: it is `improved` where `strictly_improved` is None.
    """

    improved: float
    clients: int
    strictly_improved: float | None = None

    @property
    def not_risen(self) -> float | None:
        """Return ρ; None where only the strict share was recorded."""
        return None if self.strictly_improved is None else self.improved

    @property
    def fallen(self) -> float:
        """Return the share of the clients whose loss fell."""
        return self.improved if self.strictly_improved is None else self.strictly_improved


@dataclass(frozen=True)
class CutOffClient:
    """A client that missed a deadline, with its losses in the reports before and after."""

    client: str
    loss_before: float | None = None
    round_before: int | None = None
    loss_after: float | None = None
    round_after: int | None = None
    # How the losses were measured; None: exactly, or there is no loss.
    measurement_before: LossMeasurement | None = None
    measurement_after: LossMeasurement | None = None


@dataclass(frozen=True)
class RoundRecord:
    """Everything that is kept about a committed round."""

    round: int
    digest: bytes  # of the model that the round committed
    contributions: tuple[Contribution, ...]
    diagnostics: Mapping[str, Any]  # see `Diagnostics.record`
    unix_seconds: float
    promised: float | None = None  # share of clients whose loss falls to first order
    bytes_received: int = 0
    aggregation_seconds: float = 0.0
    history_evicted: int = 0  # rows
    dropped: tuple[str, ...] = ()  # selected, but without an update in the round
    attempts: int = 1
    training_seconds: float = 0.0
    commit_seconds: float = 0.0
    surplus: tuple[str, ...] = ()  # selected in excess, and not needed
    privacy: PrivacyRelease | None = None
    admission: tuple[AdmissionFinding, ...] = ()
    verification: VerificationRecord | None = None
    settings_digest: bytes = b""  # of the settings that the round ran with; empty: not recorded
    measured: StepImprovement | None = None
    cut_off: tuple[CutOffClient, ...] = ()
    undone: bool = False  # the federation went back to an earlier version

    def to_json(self) -> str:
        """Return the JSON that the database stores."""
        values = {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name not in LATER_FIELDS
        }
        values["digest"] = self.digest.hex()
        values["settings_digest"] = self.settings_digest.hex()
        values["contributions"] = [
            {"client": part.client, "weight": part.weight, "report": part.report.model_dump()}
            for part in self.contributions
        ]
        values["admission"] = [asdict(finding) for finding in self.admission]
        values["privacy"] = asdict(self.privacy) if self.privacy else None
        values["verification"] = asdict(self.verification) if self.verification else None
        for name in OPTIONAL_FIELDS:
            if not values[name]:
                del values[name]
        return json.dumps(values)

    @classmethod
    def from_json(cls, text: str) -> RoundRecord:
        """Return the record that `to_json`, or an earlier version of it, has written."""
        values = json.loads(text)
        names = {field.name for field in fields(cls)} - set(LATER_FIELDS)
        values = {name: value for name, value in values.items() if name in names}
        values["digest"] = bytes.fromhex(values["digest"])
        values["settings_digest"] = bytes.fromhex(values.get("settings_digest", ""))
        values["contributions"] = tuple(map(_contribution, values["contributions"]))
        values["admission"] = tuple(
            AdmissionFinding(**finding) for finding in values.get("admission", ())
        )
        for name in ("dropped", "surplus"):
            values[name] = tuple(values.get(name, ()))
        if release := values.get("privacy"):
            values["privacy"] = PrivacyRelease(**release)
        if verification := values.get("verification"):
            values["verification"] = _verification(verification)
        return cls(**values)


def _contribution(values: Mapping[str, Any]) -> Contribution:
    return Contribution(values["client"], values["weight"], TrainReport(**values["report"]))


def _verification(values: Mapping[str, Any]) -> VerificationRecord:
    sequences = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    return VerificationRecord(**{**values, **sequences})
