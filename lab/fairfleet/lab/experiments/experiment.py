"""The description of an experiment: data and their partition, model, plan, rule and faults.

It contains everything that influences the result and nothing else, so two equal experiments
produce the same model. Its key identifies it in the records.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    field_validator,
    model_validator,
)

from fairfleet.common.codecs import codec_named, uses_error_feedback
from fairfleet.common.errors import BadRequest, UsageError
from fairfleet.common.reports import BUILT_IN, check_measure_name
from fairfleet.common.training_plan import Plan
from fairfleet.lab.datasets.registry import state_of_own
from fairfleet.lab.experiments.revisions import (
    PastReadings,
    as_first_written,
    earlier_readings,
    past_readings,
)
from fairfleet.lab.experiments.rule_spec import parse_rule
from fairfleet.lab.label_noise import LabelCorrection, LabelNoise
from fairfleet.lab.partitioning.partitions import Partition
from fairfleet.lab.partitioning.splits import check_shares
from fairfleet.lab.simulation.behaviour import Behaviour
from fairfleet.server.aggregation.admission import AdmissionSettings
from fairfleet.server.aggregation.diagnostics import DiagnosticsSetting
from fairfleet.server.privacy.settings import PrivacySettings, refusal
from fairfleet.server.rounds.selection import Selection
from fairfleet.server.rules import Recipe, RuleError
from fairfleet.server.settings import VerificationSettings, plan_for_rule

DEFAULT_PLAN = Plan(steps=10, batch_size=32, learning_rate=0.1)


class Experiment(BaseModel):
    """Describes one training run.

    The default is the demo: ten clients with digits, two of which have rotated images. The key of
    an experiment leaves out fields that have their default, so a default must never change.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    data: str = Field(
        default="digits-rotated",
        description="dataset, with options: synthetic,alpha=0.5; or the path of your own data",
    )
    part: Literal["all", "train"] = Field(
        default="all",
        description="all: the published parts together; train: the published training part only",
    )
    classes: tuple[NonNegativeInt, ...] = Field(
        default=(), description="use only these classes, renumbered from 0; empty: all classes"
    )
    preprocessing: str = Field(
        default="unit", description="conversion of samples: unit, plain, cifar10 or standard"
    )
    partition: str = Field(
        default="user", description="how samples are divided among clients: iid, dirichlet:0.1, …"
    )
    clients: PositiveInt | None = Field(
        default=None, description="number of clients; None: the number that the data define"
    )
    split: tuple[float, ...] | Literal["published"] | None = Field(
        default=None,
        description=(
            "shares for train, test and validation, or published; "
            "None: published for natural clients, 80/20 for others"
        ),
    )
    train_share: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="share of each client's training samples that is used",
    )
    data_seed: NonNegativeInt | None = Field(
        default=None,
        description="seed of partition, split and label noise; None: the experiment's seed",
    )
    label_noise: LabelNoise | None = Field(
        default=None, description="wrong training labels: clients, lowest; None: as in the data"
    )
    label_correction: LabelCorrection | None = Field(
        default=None,
        description="FedCorr: find and correct wrong labels before the rounds; None: do not",
    )
    model: str = Field(default="softmax+zero", description="model: softmax, mlp:200,200, …")
    rule: str = Field(
        default="fedavg",
        description="aggregation rule: name,parameter=value,…; see `fairfleet rules`",
    )
    optimizer: str | None = Field(
        default=None, description="server optimizer that replaces the rule's own: sgd,eta=0.5"
    )
    plan: Plan = Field(default=DEFAULT_PLAN, description="local training of the clients")
    rounds: PositiveInt = Field(default=100, description="number of rounds")
    clients_per_round: NonNegativeInt = Field(
        default=0, description="clients selected per round; 0: all"
    )
    selection: Selection = Field(
        default="uniform", description="how clients are selected: uniform, samples, …"
    )
    evaluate_every: NonNegativeInt = Field(
        default=10, description="rounds between evaluations; the last round is always evaluated"
    )
    seed: int = Field(
        default=0, ge=0, lt=2**63, description="seed of data, selection, batches and first model"
    )
    verification: VerificationSettings | None = Field(
        default=None,
        description="the round's clients test the step, and shorter ones, before it is applied",
    )
    behaviour: Behaviour = Field(
        default=Behaviour(), description="dropouts, stragglers, late joiners and attacks"
    )
    admission: AdmissionSettings = Field(
        default=AdmissionSettings(), description="how unusual updates are treated"
    )
    diagnostics: DiagnosticsSetting = Field(
        default="auto", description="figures computed for each round: auto, full, model or off"
    )
    codec: str = Field(
        default="raw32", description="compression of updates: int8, topk:0.01, int8+zstd, …"
    )
    # Records leave it out where it is on: they are older than "auto", which `_resolve_feedback`
    # replaces by what it means for the codec.
    error_feedback: bool = Field(
        default=True,
        description="send what a lossy codec dropped with the next update; left out or auto: for "
        "biased codecs only, so not for int8 and int4",
    )
    prediction: bool = Field(
        default=True,
        description="topk, topsign: delta-code updates against the client's previous one",
    )
    learning_rate_decay: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="the same as plan.learning_rate_decay, for experiments that were written "
        "before it",
    )
    loss: Literal["before", "after"] = Field(
        default="before", description="loss reported to the rule: before or after local training"
    )
    loss_total: bool = Field(
        default=False, description="report the sum of the losses over the samples, not their mean"
    )
    judged: Literal["last", "average"] = Field(
        default="last",
        description="model that is evaluated: the newest, or the mean of all models so far",
    )
    measure: str = Field(
        default="accuracy",
        description="figure by which models are judged: accuracy, loss or one of `measures`",
    )
    measures: str = Field(
        default="",
        description="module:function that returns further measures, by name, of the outputs and "
        "targets of a client's test samples",
    )
    privacy: PrivacySettings | None = Field(
        default=None, description="differential privacy: clip, noise_multiplier, where"
    )

    @model_validator(mode="before")
    @classmethod
    def _resolve_feedback(cls, values: Any) -> Any:
        """Replace "auto", the default, by what it means for the codec."""
        if not isinstance(values, Mapping) or values.get("error_feedback", "auto") != "auto":
            return values
        codec = values.get("codec", "raw32")
        try:
            return {**values, "error_feedback": uses_error_feedback("auto", codec)}
        except (BadRequest, AttributeError):  # it is no codec, which another check reports
            return {**values, "error_feedback": True}

    @field_validator("partition")
    @classmethod
    def _normalise_partition(cls, text: str) -> str:
        return str(Partition.parse(text))

    @field_validator("split")
    @classmethod
    def _check_split(cls, split: Any) -> Any:
        if isinstance(split, tuple):
            check_shares(split)
        return split

    @field_validator("plan", mode="before")
    @classmethod
    def _complete_plan(cls, given: Any) -> Any:
        """Fill in the defaults of a partial plan; `epochs` replaces the default's steps."""
        if isinstance(given, Plan):
            return given if given.epochs or given.steps else given.model_copy(update={"epochs": 1})
        if not isinstance(given, Mapping):
            return given
        lengths = [given[name] for name in ("epochs", "steps") if name in given]
        if lengths and not any(lengths):
            return {**given, "epochs": 1}  # A plan with neither epochs nor steps means one epoch.
        defaults = DEFAULT_PLAN.model_dump(
            exclude_defaults=True, exclude={"steps"} if given.get("epochs") else None
        )
        return {**defaults, **given}

    @field_validator("codec")
    @classmethod
    def _normalise_codec(cls, text: str) -> str:
        try:
            return codec_named(text).name
        except BadRequest as error:
            raise ValueError(str(error)) from None

    @field_validator("rule")
    @classmethod
    def _check_rule(cls, text: str) -> str:
        parse_rule(text)
        return text

    @model_validator(mode="after")
    def _check_solver(self) -> Experiment:
        """Refuse a solver that the rule's formula does not cover."""
        self.recipe()
        return self

    @model_validator(mode="after")
    def _check_decay(self) -> Experiment:
        """Refuse two different decays of the clients' learning rate."""
        given = {self.learning_rate_decay, self.plan.learning_rate_decay} - {1.0}
        if len(given) > 1:
            raise ValueError(
                f"learning_rate_decay is {self.learning_rate_decay:g} and "
                f"plan.learning_rate_decay is {self.plan.learning_rate_decay:g}; give one of them"
            )
        return self

    @model_validator(mode="after")
    def _check_privacy(self) -> Experiment:
        """Refuse a rule, selection or admission that defeats the requested privacy."""
        if self.privacy is not None:
            recipe = self.recipe()
            tries_steps = self.verification is not None or recipe.rule.needs().line_search
            if why := refusal(self.privacy, recipe, tries_steps, self.selection, self.admission):
                raise ValueError(why)
        return self

    @model_validator(mode="after")
    def _check_label_correction(self) -> Experiment:
        """Refuse what the stages before the rounds cannot keep, or cannot correct."""
        if self.label_correction is None:
            return self
        if self.privacy is not None:
            raise ValueError(
                "label_correction cannot be combined with privacy: its models and figures are not "
                "protected; leave one of them out"
            )
        if "+probabilities" in self.model:
            raise ValueError(
                f"label_correction needs a model that returns logits, found {self.model}; leave "
                "out +probabilities"
            )
        if any(attack.kind == "label_noise" for attack in self.behaviour.attacks):
            raise ValueError(
                "label_correction comes before attacks, so it cannot correct the labels of the "
                "attack label_noise; use the field label_noise of the experiment instead"
            )
        return self

    @model_validator(mode="after")
    def _check_measure(self) -> Experiment:
        if self.measure in BUILT_IN:
            return self
        check_measure_name(self.measure)
        if not self.measures:
            raise ValueError(
                f"measure {self.measure} is neither accuracy nor loss; give measures, the "
                "module:function that computes it"
            )
        return self

    def key(self) -> str:
        """Return the identifier of this experiment in the records, as 16 hexadecimal digits.

        Equal experiments have equal keys at any time. The key of an experiment on your own files
        changes when these files change. It also changes when the meaning of its rule, dataset or
        measures does (`revisions`).
        """
        return self._key({subject: len(past) + 1 for subject, past in self._past().items()})

    def earlier_keys(self) -> dict[str, str]:
        """Return the keys that this experiment had before revisions, by the earlier readings."""
        return {words: self._key(revisions) for words, revisions in earlier_readings(self._past())}

    def _past(self) -> PastReadings:
        return past_readings(self.rule, self.plain_recipe(), self.plan, self.data)

    def _key(self, revisions: Mapping[str, int]) -> str:
        values = self.model_dump(mode="json", exclude_defaults=True)
        if "rule" in values:
            values["rule"] = as_first_written(self.rule)
        if later := {subject: number for subject, number in revisions.items() if number > 1}:
            values["revisions"] = later
        if state := state_of_own(self.data):
            values["state_of_data"] = state
        text = json.dumps(values, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def plain_recipe(self) -> Recipe:
        """Return the rule and the optimizer as written, without what the plan tells the rule."""
        return parse_rule(self.rule, self.optimizer)

    def recipe(self) -> Recipe:
        """Return the rule, as the plan makes it, and the optimizer of this experiment.

        Raises UsageError if the rule's formula does not cover the plan's solver.
        """
        recipe = self.plain_recipe()
        try:
            return recipe.for_plan(plan_for_rule(self.plan, recipe))
        except RuleError as error:
            raise UsageError(f"rule {self.rule}: {error}") from None
