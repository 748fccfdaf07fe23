"""An experiment in words: data and how they are shared out, a model, a plan, a rule, and what may go wrong.

Everything that has a say in the result is here, and nothing else is: two equal experiments give the same model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from fairfleet.common.codecs import codec_named
from fairfleet.common.errors import BadRequest, UsageError
from fairfleet.common.plan import Plan
from fairfleet.lab import models
from fairfleet.lab.behaviour import Behaviour
from fairfleet.lab.clients import ClientData
from fairfleet.lab.datasets.base import Dataset
from fairfleet.lab.datasets.preprocessing import Preprocessing, preprocessing
from fairfleet.lab.datasets.registry import load, state_of_own
from fairfleet.lab.federation import Engine, Federation
from fairfleet.lab.partitions import Indices, Partition, Split, check_shares, partition, split_all, split_as_published
from fairfleet.server.admission import Admission
from fairfleet.server.privacy import PrivacySettings, refusal
from fairfleet.server.rules import Recipe, RuleError, optimizer, recipe
from fairfleet.server.selection import Selection
from fairfleet.server.settings import VerificationSettings

PLAN = Plan(steps=10, batch_size=32, learning_rate=0.1)
USUAL_SPLIT = (0.8, 0.2)


class Experiment(BaseModel):
    """The default is the demo's: ten clients with digits, two of whom hold their images turned."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    data: str = Field(default="digits-rotated", description="a dataset, with options: synthetic,alpha=0.5")
    part: Literal["all", "train"] = Field(default="all", description="the published parts pooled, or one of them")
    classes: tuple[NonNegativeInt, ...] = Field(default=(), description="only these, renumbered; none: all")
    preprocessing: str = "unit"
    partition: str = "user"
    clients: PositiveInt | None = Field(default=None, description="None: as many as the data say")
    split: tuple[float, ...] | Literal["published"] | None = Field(
        default=None, description="train, test, validation; None: natural clients as published, others 80/20"
    )
    train_share: float = Field(default=1.0, gt=0, le=1, description="of each client's training samples; others unused")
    data_seed: NonNegativeInt | None = Field(default=None, description="of partition and split; None: the seed")
    model: str = "softmax+zero"
    rule: str = Field(default="fedavg", description="name,parameter=value,…; see `fairfleet rules`")
    optimizer: str | None = Field(default=None, description="instead of the rule's own: sgd,eta=0.5")
    plan: Plan = PLAN
    rounds: PositiveInt = 100
    clients_per_round: NonNegativeInt = Field(default=0, description="0: all")
    selection: Selection = Field(default="uniform", description="how they are drawn: uniform, samples, …")
    evaluate_every: NonNegativeInt = Field(default=10, description="rounds; the last always")
    seed: int = Field(default=0, ge=0, lt=2**63)
    verification: VerificationSettings | None = Field(
        default=None, description="the round's clients try a step, and shorter ones, before it is taken"
    )
    behaviour: Behaviour = Behaviour()
    admission: Admission = Field(default=Admission(), description="what is done about updates out of the ordinary")
    codec: str = Field(default="raw32", description="that updates pass through: int8, topk:0.01, int8+zstd, …")
    error_feedback: bool = Field(default=True, description="what a lossy codec leaves out is sent with the next")
    prediction: bool = Field(default=True, description="topk, topsign: updates are told by the client's last one")
    learning_rate_decay: float = Field(default=1.0, gt=0, le=1, description="of the clients' rate, per round")
    loss: Literal["before", "after"] = Field(default="before", description="training: which loss the rule is told")
    loss_total: bool = Field(default=False, description="the rule is told the sum over the samples, not their mean")
    judged: Literal["last", "average"] = Field(default="last", description="the newest model, or the mean of all")
    privacy: PrivacySettings | None = Field(default=None, description="clip, noise_multiplier, where: client or server")

    @field_validator("partition")
    @classmethod
    def _known_partition(cls, text: str) -> str:
        return str(Partition.parse(text))

    @field_validator("split")
    @classmethod
    def _right_shares(cls, split: Any) -> Any:
        if isinstance(split, tuple):
            check_shares(split)
        return split

    @field_validator("plan", mode="before")
    @classmethod
    def _whole_plan(cls, given: Any) -> Any:
        """What a plan leaves open is as in the default; epochs take the place of its steps."""
        if isinstance(given, Plan):
            return given if given.epochs or given.steps else given.model_copy(update={"epochs": 1})
        if not isinstance(given, Mapping):
            return given
        lengths = [given[name] for name in ("epochs", "steps") if name in given]
        if lengths and not any(lengths):
            return {**given, "epochs": 1}  # which a plan without either means
        usual = PLAN.model_dump(exclude_defaults=True, exclude={"steps"} if given.get("epochs") else None)
        return {**usual, **given}

    @field_validator("codec")
    @classmethod
    def _known_codec(cls, text: str) -> str:
        try:
            return codec_named(text).name
        except BadRequest as error:
            raise ValueError(str(error)) from None

    @field_validator("rule")
    @classmethod
    def _known_rule(cls, text: str) -> str:
        rule_named(text)
        return text

    @model_validator(mode="after")
    def _private_enough(self) -> Experiment:
        if self.privacy is not None:
            made = self.recipe()
            tries_steps = self.verification is not None or made.rule.needs().line_search
            if why := refusal(self.privacy, made, tries_steps, self.selection, self.admission):
                raise ValueError(why)
        return self

    def key(self) -> str:
        """The same for the same experiment, on any day; one's own files are others once they have changed."""
        values = self.model_dump(mode="json", exclude_defaults=True)
        if state := state_of_own(self.data):
            values["state_of_data"] = state
        text = json.dumps(values, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def recipe(self) -> Recipe:
        return rule_named(self.rule, self.optimizer)


def rule_named(text: str, after: str | None = None) -> Recipe:
    """`adafed,gamma=5`, and the optimizer `sgd,eta=0.5` if there is to be another than the rule's own."""
    try:
        name, parameters = _taken_apart(text)
        if after is None:
            return recipe(name, **parameters)
        other, its = _taken_apart(after)
        return recipe(name, optimizer(other, **its), **parameters)
    except RuleError as error:
        raise UsageError(f"rule {text}: {error}") from None


def _taken_apart(text: str) -> tuple[str, dict[str, str]]:
    name, *pairs = text.replace(" ", "").split(",")
    names = [pair.partition("=")[0] for pair in pairs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(f"rule {text} says {', '.join(twice)} more than once: say it once")
    return name, {key: value for key, _, value in (pair.partition("=") for pair in pairs)}


def federation(experiment: Experiment, data_dir: Path | None, engine: Engine = "auto", workers: int = 0) -> Federation:
    whole = load_once(experiment.data, data_dir, state_of_own(experiment.data))
    dataset = _chosen(experiment, whole)
    clients = fleet(experiment, dataset, preprocessing(experiment.preprocessing, whole))
    shape, seed = clients[0].train_x.shape[1:], experiment.seed
    check_input(experiment, _extremes(clients), dataset.classes)
    plan = experiment.plan if experiment.plan.seed else experiment.plan.model_copy(update={"seed": seed})
    return Federation(
        clients=clients,
        model=partial(models.model, experiment.model, shape, dataset.classes, seed),
        recipe=experiment.recipe(),
        plan=plan,
        rounds=experiment.rounds,
        clients_per_round=experiment.clients_per_round,
        selection=experiment.selection,
        seed=seed,
        evaluate_every=experiment.evaluate_every,
        verification=experiment.verification.terms() if experiment.verification else None,
        behaviour=experiment.behaviour,
        admission=experiment.admission,
        codec=experiment.codec,
        error_feedback=experiment.error_feedback,
        prediction=experiment.prediction and experiment.privacy is None,
        learning_rate_decay=experiment.learning_rate_decay,
        loss=experiment.loss,
        loss_total=experiment.loss_total,
        judged=experiment.judged,
        privacy=experiment.privacy,
        engine=engine,
        workers=workers,
    )


def check_input(experiment: Experiment, samples: np.ndarray, classes: int) -> None:
    """Before anything is trained: whether the model takes what preprocessing makes of the data."""
    made = models.model(experiment.model, samples.shape[1:], classes, experiment.seed).eval()
    try:
        with torch.inference_mode():
            made(torch.from_numpy(np.ascontiguousarray(samples)))
    except (RuntimeError, IndexError, ValueError) as error:
        raise UsageError(
            f"the model {experiment.model} cannot take the samples of {experiment.data}, which preprocessing "
            f"{experiment.preprocessing!r} makes {samples.dtype} of shape {samples.shape[1:]} ({error}). Tokens need "
            "--set preprocessing=plain, images and numbers unit; or choose another model"
        ) from None


def _extremes(clients: Sequence[ClientData]) -> np.ndarray:
    """Two samples that a model which takes them takes all: of tokens, the lowest and the highest that there are."""
    first = clients[0].train_x[:2]
    if first.dtype.kind not in "iu":
        return first
    held = [part for one in clients for part in (one.train_x, one.test_x) if part.size]
    ends = (min(int(part.min()) for part in held), max(int(part.max()) for part in held))
    return np.stack([np.full(first.shape[1:], end, first.dtype) for end in ends])


def fleet(experiment: Experiment, dataset: Dataset, convert: Preprocessing) -> list[ClientData]:
    """Every client's own samples, ready for a model."""
    seed = experiment.seed if experiment.data_seed is None else experiment.data_seed
    parts = partition(experiment.partition, dataset.y, dataset.user, experiment.clients, seed)
    splits = [
        _used(own, experiment.train_share, (seed, k)) for k, own in enumerate(_split(experiment, dataset, parts, seed))
    ]
    names = _names(experiment, dataset, parts)
    x, y = dataset.x, dataset.y
    return [
        ClientData(name, convert(x[own.train]), y[own.train], convert(x[own.test]), y[own.test])
        for name, own in zip(names, splits, strict=True)
    ]


def _chosen(experiment: Experiment, whole: Dataset) -> Dataset:
    dataset = whole.training_part() if experiment.part == "train" else whole
    return dataset.only_classes(experiment.classes) if experiment.classes else dataset


@lru_cache(maxsize=2)
def load_once(name: str, data_dir: Path | None, state: str) -> Dataset:
    """A sweep reads its data once, and again when they have changed."""
    return load(name, data_dir)


def _split(experiment: Experiment, dataset: Dataset, parts: Sequence[Indices], seed: int) -> list[Split]:
    has_test_part = dataset.train_size < len(dataset)
    # other partitions may cut a class in the order of the file: its test part would be with a few of the clients
    natural = experiment.partition.startswith("user")
    shares = experiment.split or ("published" if has_test_part and natural else USUAL_SPLIT)
    if shares != "published":
        return split_all(parts, shares, seed)
    if not has_test_part:
        raise UsageError(f"{dataset.name} has no published test part here; give a split, such as [0.8, 0.2]")
    return split_as_published(parts, dataset.train_size)


def _used(own: Split, share: float, seed: tuple[int, int]) -> Split:
    """With only a part of the training samples, drawn at random."""
    if share == 1.0:
        return own
    mixed = np.random.default_rng(seed).permutation(own.train)
    return own._replace(train=mixed[: max(1, round(share * len(mixed)))])


def _names(experiment: Experiment, dataset: Dataset, parts: Sequence[Indices]) -> list[str]:
    if experiment.partition.startswith("user") and dataset.user is not None and dataset.user_names:
        return [dataset.user_names[dataset.user[indices[0]]] for indices in parts]
    width = len(str(len(parts) - 1))
    return [f"client-{number:0{width}d}" for number in range(len(parts))]
