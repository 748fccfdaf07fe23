"""Settings of differential privacy for clients, and which rules and models they go with: see docs/privacy.md.

Noise at the client makes everything after it post-processing, so any rule may follow. Noise on the server's aggregate
hides a client only if that is the plain mean of clipped updates: a rule whose coefficients depend on the updates lets
one client change the weights of all others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from fairfleet.common.privacy import NO_TERMS, Noise, ReportTerms, SystemNoise, Terms, add_noise, clip
from fairfleet.common.tensors import Section, Signature, Vector
from fairfleet.server.accounting import REPLACED, Draw, report_cost, update_cost
from fairfleet.server.admission import Admission
from fairfleet.server.rules import Recipe
from fairfleet.server.selection import Selection

EVALUATED_VALUES = 2  # loss and accuracy


class PrivacySettings(BaseModel):
    """Client-level differential privacy."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    where: Literal["client", "server"] = Field(description="who adds the noise: each client, or the server to the mean")
    clip: PositiveFloat = Field(description="the largest norm of an update; longer ones are shortened to it")
    noise_multiplier: NonNegativeFloat = Field(
        description="standard deviation of the noise in units of clip: on every update, or on a round's sum; 0: none"
    )
    delta: float = Field(default=1e-5, gt=0, lt=1, description="of (epsilon, delta); well below 1 / clients")
    cohort: PositiveInt | None = Field(
        default=None,
        description="where: server: what a round's sum is divided by, however many answer; default: round.clients, or "
        "else round.minimum_clients",
    )
    amplification: bool = Field(
        default=False,
        description="where: server: count on it that nobody who sees models knows who was drawn (selection uniform)",
    )
    reports: Literal["uncovered", "noised"] = Field(
        default="uncovered",
        description="losses, gradient norms and evaluations: sent as they are, or bounded and noised",
    )
    report_noise: PositiveFloat = Field(default=1.0, description="of noised reports, in units of each value's bound")
    loss_bound: PositiveFloat = Field(default=5.0, description="of noised reports: a larger loss counts as this")
    gradient_bound: PositiveFloat = Field(default=5.0, description="of noised reports: the same for gradient norms")
    max_epsilon: PositiveFloat | None = Field(
        default=None, description="the federation ends before a round that could spend more; default: it never does"
    )

    @model_validator(mode="after")
    def _sense(self) -> PrivacySettings:
        if self.max_epsilon is not None and not self.noise_multiplier:
            raise ValueError("max_epsilon cannot be kept without noise: give noise_multiplier above 0, or leave it out")
        if self.where == "client" and (self.amplification or self.cohort is not None):
            raise ValueError(
                "amplification and cohort are for noise at the server: whoever adds noise at the client does not trust "
                "the server, and the server knows whom it asked"
            )
        return self

    @property
    def local(self) -> bool:
        return self.where == "client"

    def terms(self, recipe: Recipe) -> Terms | None:
        """What clients are to do before they send; None: nothing."""
        reports = self.report_terms("accuracy" in recipe.rule.needs().reports)
        if self.local:
            return Terms(clip=self.clip, noise_multiplier=self.noise_multiplier, reports=reports)
        return Terms(reports=reports) if reports else None

    def report_terms(self, accuracy: bool = False) -> ReportTerms | None:
        if self.reports == "uncovered":
            return None
        return ReportTerms(
            noise_multiplier=self.report_noise,
            loss_bound=self.loss_bound,
            gradient_bound=self.gradient_bound,
            accuracy=accuracy,
        )

    # ---- what is spent -------------------------------------------------------------------------

    def cost_of(self, made: Terms, values: int) -> float:
        """Of what one update shows the server, to which this was done, with so many numbers beside it."""
        return self._reported_cost(made, values) + (update_cost(made.noise_multiplier) if self.local else 0.0)

    def evaluation_cost_of(self, made: Terms) -> float:
        return self._reported_cost(made, EVALUATED_VALUES)

    def _reported_cost(self, made: Terms, values: int) -> float:
        """What goes as it is is not covered, and so costs nothing: `not_covered` tells."""
        noised = self.reports == "noised" and made.reports
        return report_cost(noised.noise_multiplier, values) if noised else 0.0

    def released_cost(self, recipe: Recipe) -> float:
        """Of an update as it is asked for."""
        values = 1 + len({"accuracy", "gradient_norm"} & set(recipe.rule.needs().reports))
        return self.cost_of(self.terms(recipe) or NO_TERMS, values)

    @property
    def evaluation_cost(self) -> float:
        """Of an evaluation as it is asked for."""
        return self.evaluation_cost_of(Terms(reports=self.report_terms()))

    @property
    def commit_cost(self) -> float:
        """Of what a committed model shows of each client that took part in its round."""
        return 0.0 if self.local else update_cost(self.noise_multiplier)

    def draw(self, drawn: int, among: int) -> Draw:
        return Draw(self.noise_multiplier / REPLACED, drawn, among)

    # ---- the mean, with noise ------------------------------------------------------------------

    def disguised(self, cohort: int, noise: Noise | None = None) -> Disguised | None:
        """How the server makes a round's mean private; None where clients see to that."""
        return None if self.local else Disguised(self.clip, self.noise_multiplier, cohort, noise or SystemNoise())

    # ---- what it does not cover ----------------------------------------------------------------

    @property
    def not_covered(self) -> str:
        """For people to read; in `status` as long as it is true."""
        if self.reports == "uncovered":
            return (
                "losses, gradient norms, sample counts, training times and evaluations are sent as they are: epsilon "
                "does not cover them"
            )
        return "epsilon does not cover the sample counts that clients join with, nor when and how often they answer"

    @property
    def against(self) -> str:
        if self.local:
            return "everyone, the server included"
        return "those who see models; the server and its operator see every update as it is"


@dataclass(frozen=True)
class Disguised:
    """Noise at the server: updates are clipped when they are whole, and their mean gets the noise."""

    bound: float
    noise_multiplier: float
    cohort: int
    noise: Noise

    def clip(self, rows: Iterable[Vector]) -> None:
        for row in rows:
            clip(row, self.bound)

    def disguise(self, mean: Vector, clients: int) -> None:
        """Makes of the mean over those who answered their sum over the fixed number, with noise; in place.

        How many answered may depend on anybody's data; a fixed divisor does not.
        """
        mean *= mean.dtype.type(clients / self.cohort)
        add_noise(mean, self.noise_multiplier * self.bound / self.cohort, self.noise)


def refusal(
    privacy: PrivacySettings, recipe: Recipe, tries_steps: bool, selection: Selection, admission: Admission
) -> str | None:
    """Why this privacy does not go with this rule; None where it does."""
    if not privacy.local and not recipe.rule.is_plain_mean():
        return (
            f"rule {recipe.name!r} weighs updates by what clients sent, so noise that the server adds afterwards does "
            "not hide a client. Either let clients add it (privacy.where: client; what follows is post-processing), "
            "or average all alike (rule fedavg, fedprox or fedadam with weighting: uniform)."
        )
    if not privacy.local and admission.acts:
        return (
            "admission clips, winsorises, caps or rejects by what others sent, so one client would change what the "
            "others count for, and noise that the server adds afterwards does not hide it. Let admission only observe, "
            "or let clients add the noise (privacy.where: client)."
        )
    if tries_steps and (not privacy.local or privacy.reports == "noised"):
        return (
            f"steps are tried by clients here (verification, or the line search of rule {recipe.name!r}), and the "
            "losses that they answer with are not noised. Leave verification out or choose another rule; or use "
            "privacy.where: client with reports: uncovered, and epsilon does not cover them."
        )
    if privacy.amplification and selection != "uniform":
        return (
            f"selection {selection!r} can be predicted, or depends on clients' data, so it hides nobody. "
            "Use round.selection: uniform, or leave privacy.amplification out."
        )
    return None


def model_refusal(signature: Signature) -> str | None:
    """Why a model cannot be trained with privacy; None where it can."""
    names = [tensor.name for section in (Section.BUFFERS, Section.COUNTERS) for tensor, _ in signature.spans(section)]
    if not names:
        return None
    return (
        f"the model has buffers ({', '.join(names[:3])}{', …' if len(names) > 3 else ''}), which are averaged without "
        "clipping or noise: privacy would not cover them. Use layers without running statistics, such as GroupNorm or "
        "LayerNorm instead of BatchNorm."
    )
