"""Rules x settings x codecs x seeds over one base experiment, as YAML or flags say it; resumed by its ledger."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, field_validator, model_validator
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from fairfleet.lab.experiment import Experiment
from fairfleet.lab.records import Ledger, Run
from fairfleet.lab.runs import Names, run

DEFAULT_RULES = ("fedavg", "fedavg,weighting=uniform", "fedfv", "fedlf")


class Variant(BaseModel):
    """A rule or a setting: its name in tables, and which fields of the base it changes."""

    model_config = ConfigDict(frozen=True, extra="allow")
    label: str = ""

    @property
    def changes(self) -> dict[str, Any]:
        return self.model_extra or {}


class Planned(NamedTuple):
    label: str
    setting: str
    experiment: Experiment


class Sweep(BaseModel):
    """What `fairfleet compare` runs. A rule is `fedfv,alpha=0.1`, or a mapping that changes other fields as well."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(default="comparison", pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}$")  # also of a folder
    base: dict[str, Any] = Field(default_factory=dict, description="fields of an experiment")
    rules: tuple[Variant, ...] = Field(default=(), validate_default=True)
    seeds: tuple[NonNegativeInt, ...] = Field(default=(0, 1, 2), min_length=1)
    settings: tuple[Variant, ...] = Field(default=(Variant(),), min_length=1)
    codecs: tuple[str, ...] = Field(default=(), description="each a part of every setting; none: the experiment's own")

    @field_validator("rules", mode="before")
    @classmethod
    def _named_rules(cls, rules: Any) -> Any:
        if isinstance(rules, Mapping):
            raise ValueError("expected a list: each rule behind a dash")
        chosen = [rules] if isinstance(rules, str) else rules or DEFAULT_RULES
        return tuple({"label": one, "rule": one} if isinstance(one, str) else _labelled(one) for one in chosen)

    @model_validator(mode="after")
    def _nothing_is_said_in_vain(self) -> Sweep:
        """What rules, seeds and codecs say of every run, nothing else can say."""
        everywhere = {"base": self.base, **{f"settings, {one.label!r}": one.changes for one in self.settings}}
        ruled = {f"rules, {one.label!r}": one.changes for one in self.rules}
        for place, changes in (everywhere | ruled).items():
            if "seed" in changes:
                raise ValueError(f"{place}: seed has no effect, since a sweep runs its seeds; say seeds: [...] instead")
            if "codec" in changes and self.codecs:
                raise ValueError(f"{place}: codec has no effect beside codecs; say it there")
            if "rule" in changes and place in everywhere:
                raise ValueError(f"{place}: rule has no effect, since a sweep runs its rules; say rules: [...] instead")
        return self

    @model_validator(mode="after")
    def _all_experiments_are_right(self) -> Sweep:
        labels = [(one.label, one.setting, one.experiment.seed) for one in self.planned()]
        if len(set(labels)) != len(labels):
            raise ValueError("two rules, two settings, two codecs or two seeds of the sweep have the same name")
        return self

    def planned(self) -> Iterator[Planned]:
        """All of setting 1, rule by rule and seed by seed, then the next setting; a seed's codecs one after another."""
        codecs = [{"codec": codec} for codec in self.codecs] or [{}]
        for setting, seed, codec, rule in product(self.settings, self.seeds, codecs, self.rules):
            values = merged(self.base, setting.changes, rule.changes, codec, {"seed": seed})
            words = ", ".join(part for part in (setting.label, *codec.values()) if part)
            yield Planned(rule.label, words, Experiment.model_validate(values))


def _labelled(one: Any) -> Any:
    return {"label": one.get("rule", ""), **one} if isinstance(one, Mapping) else one


def merged(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Later layers win; mappings inside are merged."""
    out: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            inner = out.get(key)
            out[key] = merged(inner, value) if isinstance(inner, Mapping) and isinstance(value, Mapping) else value
    return out


@dataclass(frozen=True)
class Means:
    """How to run: with which data, on how many cores."""

    data_dir: Path | None = None
    workers: int = 0


def run_sweep(planned: list[Planned], ledger: Ledger, means: Means, console: Console | None) -> list[Run]:
    """The runs of the sweep in its order. Those that the ledger has are not run again."""
    known = {key: one for key, one in ledger.runs().items() if one.complete}
    keys = [one.experiment.key() for one in planned]
    missing = {key: one for key, one in zip(keys, planned, strict=True) if key not in known}
    if missing:
        ledger.prepare()
    with _bars(console) as bars:
        rounds = sum(one.experiment.rounds for one in missing.values())
        whole = bars.add_task(f"{len(missing)} of {len(planned)} runs", total=max(rounds, 1), visible=len(missing) > 1)
        before = 0
        for key, one in missing.items():
            known[key] = _run_one(one, ledger, means, bars, whole, before)
            before += one.experiment.rounds
    return [relabelled(known[key], one) for key, one in zip(keys, planned, strict=True)]


def finished(planned: list[Planned], ledger: Ledger) -> list[Run]:
    """Those of the sweep that are there, complete or not, without running anything."""
    known = ledger.runs()
    return [relabelled(known[key], one) for one in planned if (key := one.experiment.key()) in known]


def relabelled(found: Run, one: Planned) -> Run:
    """A run has the names that this sweep gives it, whoever ran it."""
    return found.model_copy(update={"label": one.label, "setting": one.setting})


def _run_one(one: Planned, ledger: Ledger, means: Means, bars: Progress, whole: TaskID, before: int) -> Run:
    words = " ".join(part for part in (one.setting, one.label, f"seed {one.experiment.seed}") if part)
    own = bars.add_task(words, total=one.experiment.rounds)

    def progress(done: int, planned: int) -> None:
        bars.update(own, completed=done)
        bars.update(whole, completed=before + done)  # a run may begin in its middle, from a checkpoint

    found = run(
        one.experiment,
        names=Names(one.label, one.setting),
        data_dir=means.data_dir,
        workers=means.workers,
        progress=progress,
        keep=ledger.add,
        checkpoint=ledger.checkpoint(one.experiment),
    )
    bars.remove_task(own)
    return found


def _bars(console: Console | None) -> Progress:
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=console is None,
        transient=True,
    )
