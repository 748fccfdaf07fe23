"""Settings of client-level differential privacy, and the rules and models they work with.

Noise at the client makes everything after it post-processing, so any rule may follow. Noise on the
server's aggregate hides a client only if the aggregate is the plain mean of clipped updates: a rule
whose coefficients depend on the updates lets one client change the weights of all others. See
docs/explanation/privacy.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from fairfleet.common.privacy import (
    NO_TERMS,
    Noise,
    PrivacyTerms,
    ReportTerms,
    SystemNoise,
    add_noise,
    clip,
)
from fairfleet.common.privacy_costs import REPLACED, report_cost, update_cost
from fairfleet.common.reports import BUILT_IN
from fairfleet.common.tensors import Vector
from fairfleet.server.aggregation.admission import AdmissionSettings
from fairfleet.server.privacy.accountant import SampledRelease
from fairfleet.server.rounds.measure_choice import AUTO_MEASURE, MeasureChoice
from fairfleet.server.rounds.selection import Selection
from fairfleet.server.rules import Recipe

EVALUATED_VALUES = 2  # loss and accuracy


class PrivacySettings(BaseModel):
    """The section `privacy` of the server's settings: client-level differential privacy."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    where: Literal["client", "server"] = Field(
        description="Who adds the noise: each client to its update, or the server to the mean."
    )
    clip: PositiveFloat = Field(
        description="Largest norm of an update; longer updates are scaled down to it."
    )
    noise_multiplier: NonNegativeFloat = Field(
        description="Standard deviation of the noise in units of clip: on every update, or on a "
        "round's sum; 0: none."
    )
    delta: float = Field(
        default=1e-5,
        gt=0,
        lt=1,
        description="Delta of (epsilon, delta); choose it well below 1 / clients.",
    )
    cohort: PositiveInt | None = Field(
        default=None,
        description="Fixed divisor of a round's sum, however many clients answer (where: server). "
        "Default: round.clients, or else round.minimum_clients.",
    )
    amplification: bool = Field(
        default=False,
        description="Assume that nobody who sees models knows which clients were selected "
        "(where: server, selection: uniform).",
    )
    reports: Literal["uncovered", "noised"] = Field(
        default="uncovered",
        description="Whether losses, gradient norms and evaluations are sent as they are, or "
        "bounded and noised.",
    )
    report_noise: PositiveFloat = Field(
        default=1.0, description="Noise of noised reports, in units of each value's bound."
    )
    loss_bound: PositiveFloat = Field(
        default=5.0, description="Bound of noised losses: a larger loss counts as this."
    )
    gradient_bound: PositiveFloat = Field(
        default=5.0, description="Bound of noised gradient norms: a larger norm counts as this."
    )
    max_epsilon: PositiveFloat | None = Field(
        default=None,
        description="The federation ends before a round that could spend more; default: no limit.",
    )

    @model_validator(mode="after")
    def _check(self) -> PrivacySettings:
        if self.max_epsilon is not None and not self.noise_multiplier:
            raise ValueError(
                "max_epsilon cannot be guaranteed without noise: set noise_multiplier above 0, or "
                "leave max_epsilon out"
            )
        if self.where == "client" and (self.amplification or self.cohort is not None):
            raise ValueError(
                "amplification and cohort are for noise at the server: noise at the client "
                "protects against the server, and the server knows which clients it selected"
            )
        return self

    @property
    def local(self) -> bool:
        """Whether clients add the noise."""
        return self.where == "client"

    def terms(self, recipe: Recipe) -> PrivacyTerms | None:
        """Return what clients must do before they send; None: nothing."""
        reports = self.report_terms("accuracy" in recipe.rule.needs().reports)
        if self.local:
            return PrivacyTerms(
                clip=self.clip, noise_multiplier=self.noise_multiplier, reports=reports
            )
        return PrivacyTerms(reports=reports) if reports else None

    def report_terms(self, accuracy: bool = False) -> ReportTerms | None:
        """Return how clients must noise their reports; None: not at all."""
        if self.reports == "uncovered":
            return None
        return ReportTerms(
            noise_multiplier=self.report_noise,
            loss_bound=self.loss_bound,
            gradient_bound=self.gradient_bound,
            accuracy=accuracy,
        )

    # ---- costs ---------------------------------------------------------------------------------

    def cost_of(self, applied: PrivacyTerms, values: int) -> float:
        """Return the cost of an update and its reported numbers, with the privacy applied to it."""
        return self._reported_cost(applied, values) + (
            update_cost(applied.noise_multiplier) if self.local else 0.0
        )

    def evaluation_cost_of(self, applied: PrivacyTerms) -> float:
        """Return the cost of an evaluation, with the privacy applied to it."""
        return self._reported_cost(applied, EVALUATED_VALUES)

    def _reported_cost(self, applied: PrivacyTerms, values: int) -> float:
        """Return the cost of reported numbers.

        Numbers without noise are not covered by epsilon and cost nothing: `not_covered` says so.
        """
        noised = self.reports == "noised" and applied.reports
        return report_cost(noised.noise_multiplier, values) if noised else 0.0

    def released_cost(self, recipe: Recipe) -> float:
        """Return the cost of an update with the privacy that these settings require.

        A loss on the initial model, which a client reports once, costs more (`initial_loss_cost`).
        """
        values = 1 + len({"accuracy", "gradient_norm"} & set(recipe.rule.needs().reports))
        return self.cost_of(self.terms(recipe) or NO_TERMS, values)

    def initial_loss_cost(self, recipe: Recipe) -> float:
        """Return what a reported loss on the initial model costs; 0 if the rule needs none."""
        if not recipe.rule.needs().initial_loss:
            return 0.0
        return self._reported_cost(self.terms(recipe) or NO_TERMS, 1)

    @property
    def evaluation_cost(self) -> float:
        """The cost of an evaluation with the privacy that these settings require."""
        return self.evaluation_cost_of(PrivacyTerms(reports=self.report_terms()))

    @property
    def commit_cost(self) -> float:
        """The cost of a committed model for each participant of its round."""
        return 0.0 if self.local else update_cost(self.noise_multiplier)

    def draw(self, drawn: int, among: int) -> SampledRelease:
        """Return the release of a round with `drawn` clients selected `among` so many."""
        return SampledRelease(self.noise_multiplier / REPLACED, drawn, among)

    # ---- noise at the server -------------------------------------------------------------------

    def server_noise(self, cohort: int, noise: Noise | None = None) -> ServerNoise | None:
        """Return how the server makes a round's mean private; None if clients add the noise."""
        return (
            None
            if self.local
            else ServerNoise(self.clip, self.noise_multiplier, cohort, noise or SystemNoise())
        )

    # ---- coverage ------------------------------------------------------------------------------

    @property
    def not_covered(self) -> str:
        """What epsilon does not cover, as text for the federation's status."""
        if self.reports == "uncovered":
            return (
                "losses, gradient norms, sample counts, training times and evaluations are sent as "
                "they are: epsilon does not cover them"
            )
        return (
            "epsilon does not cover the sample counts that clients join with, nor when and how "
            "often they answer"
        )

    @property
    def against(self) -> str:
        """Against whom epsilon protects, as text for the federation's status."""
        if self.local:
            return "everyone, the server included"
        return "those who see models; the server and its operator see every update as it is"


@dataclass(frozen=True)
class ServerNoise:
    """Noise at the server: complete updates are clipped, and their mean gets the noise."""

    bound: float  # of an update's norm
    noise_multiplier: float
    cohort: int  # fixed divisor of a round's sum
    noise: Noise

    def clip(self, rows: Iterable[Vector]) -> None:
        """Clip updates to the bound, in place."""
        for row in rows:
            clip(row, self.bound)

    def apply(self, mean: Vector, clients: int) -> None:
        """Turn the mean over the clients that answered into their sum over the cohort, with noise.

        Works in place. The number of answers may depend on any client's data; a fixed divisor
        does not.
        """
        mean *= mean.dtype.type(clients / self.cohort)
        add_noise(mean, self.noise_multiplier * self.bound / self.cohort, self.noise)


def refusal(
    privacy: PrivacySettings,
    recipe: Recipe,
    tries_steps: bool,
    selection: Selection,
    admission: AdmissionSettings,
    measure: str = AUTO_MEASURE,
) -> str | None:
    """Return why these privacy settings do not work with the other settings; None if they do."""
    name = MeasureChoice.of(measure).name
    if privacy.reports == "noised" and name not in (AUTO_MEASURE, *BUILT_IN):
        return (
            f"measure {name} is of the tasks' own: its range is not known, so it is left out of "
            "noised reports. Use measure: accuracy or loss, or privacy.reports: uncovered."
        )
    if not privacy.local and not recipe.rule.is_plain_mean():
        return (
            f"rule {recipe.name!r} weights updates by what clients sent, so noise that the server "
            "adds afterwards does not hide a client. Either let clients add it (privacy.where: "
            "client; what follows is post-processing), or average all alike (rule fedavg, fedprox "
            "or fedadam with weighting: uniform)."
        )
    if not privacy.local and admission.acts:
        return (
            "admission clips, winsorises, caps or rejects by what others sent, so one client would "
            "change what the others count for, and noise that the server adds afterwards does not "
            "hide it. Let admission only observe, or let clients add the noise (privacy.where: "
            "client)."
        )
    if tries_steps and (not privacy.local or privacy.reports == "noised"):
        return (
            "clients try steps here (verification, or the line search of rule "
            f"{recipe.name!r}), and the losses that they report are not noised. Leave verification "
            "out or choose another rule; or use privacy.where: client with reports: uncovered, and "
            "epsilon does not cover them."
        )
    if privacy.amplification and selection != "uniform":
        return (
            f"selection {selection!r} can be predicted, or depends on clients' data, so it hides "
            "no client. Use round.selection: uniform, or leave privacy.amplification out."
        )
    return None
