"""Sweeps: rules x settings x codecs x seeds over one base experiment, from YAML or flags.

A sweep is checked completely when it is read, so a mistake in its last experiment is reported
before the first run begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, field_validator, model_validator

from fairfleet.lab.experiments.experiment import Experiment

DEFAULT_RULES = ("fedavg", "fedavg,weighting=uniform", "fedfv", "fedlf")


class Variant(BaseModel):
    """A rule or a setting: its name in tables, and the fields of the base that it changes."""

    model_config = ConfigDict(frozen=True, extra="allow")
    label: str = ""

    @property
    def changes(self) -> dict[str, Any]:
        """Return the fields of the experiment that this variant sets."""
        return self.model_extra or {}


class PlannedRun(NamedTuple):
    """One run of a sweep: an experiment and the names under which tables show it."""

    label: str  # of the rule
    setting: str
    experiment: Experiment


DEFAULT_NAME = "comparison"


class Sweep(BaseModel):
    """What `fairfleet compare` runs.

    A rule is text such as `fedfv,alpha=0.1`, or a mapping that also changes other fields.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    # The name is also that of a folder.
    name: str = Field(default=DEFAULT_NAME, pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}$")
    base: dict[str, Any] = Field(
        default_factory=dict, description="fields of the experiment that all runs share"
    )
    rules: tuple[Variant, ...] = Field(
        default=(), validate_default=True, description="rules to compare; none: a default list"
    )
    seeds: tuple[NonNegativeInt, ...] = Field(
        default=(0, 1, 2), min_length=1, description="seeds; every rule is run once with each"
    )
    settings: tuple[Variant, ...] = Field(
        default=(Variant(),), min_length=1, description="groups of fields, each run with all rules"
    )
    codecs: tuple[str, ...] = Field(
        default=(), description="codecs, each run in every setting; none: the experiment's own"
    )

    @field_validator("rules", mode="before")
    @classmethod
    def _label_rules(cls, rules: Any) -> Any:
        if isinstance(rules, Mapping):
            raise ValueError("expected a list; put each rule after a dash")
        chosen = [rules] if isinstance(rules, str) else rules or DEFAULT_RULES
        return tuple(_labelled(rule) for rule in chosen)

    @model_validator(mode="after")
    def _check_no_field_is_ignored(self) -> Sweep:
        """Refuse fields that rules, seeds or codecs of the sweep would override in every run."""
        shared = {
            "base": self.base,
            **{f"settings, {setting.label!r}": setting.changes for setting in self.settings},
        }
        by_rule = {f"rules, {rule.label!r}": rule.changes for rule in self.rules}
        for place, changes in (shared | by_rule).items():
            if "seed" in changes:
                raise ValueError(
                    f"{place}: seed has no effect, because the sweep runs its own seeds; "
                    "use seeds: [...] instead"
                )
            if "codec" in changes and self.codecs:
                raise ValueError(
                    f"{place}: codec has no effect when codecs is set; add the codec to codecs"
                )
            if "rule" in changes and place in shared:
                raise ValueError(
                    f"{place}: rule has no effect, because the sweep runs its own rules; "
                    "use rules: [...] instead"
                )
        return self

    @model_validator(mode="after")
    def _check_experiments(self) -> Sweep:
        """Build every experiment, so that mistakes are found before anything runs."""
        names = [(run.label, run.setting, run.experiment.seed) for run in self.planned()]
        if len(set(names)) != len(names):
            raise ValueError(
                "two rules, two settings, two codecs or two seeds of the sweep have the same name"
            )
        return self

    def planned(self) -> Iterator[PlannedRun]:
        """Yield all runs, setting by setting; in a setting seed by seed, then codec by codec."""
        codecs = [{"codec": codec} for codec in self.codecs] or [{}]
        for setting, seed, codec, rule in product(self.settings, self.seeds, codecs, self.rules):
            values = merged(self.base, setting.changes, rule.changes, codec, {"seed": seed})
            name = ", ".join(part for part in (setting.label, *codec.values()) if part)
            yield PlannedRun(rule.label, name, Experiment.model_validate(values))


def _labelled(rule: Any) -> Any:
    """Return the fields of a rule with a label; by default this is the text of the rule."""
    if isinstance(rule, str):
        return {"label": rule, "rule": rule}
    return {"label": rule.get("rule", ""), **rule} if isinstance(rule, Mapping) else rule


def merged(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Return one mapping of all layers; later layers win, inner mappings are merged."""
    merged_values: dict[str, Any] = {}
    for layer in layers:
        for key, value in layer.items():
            inner = merged_values.get(key)
            if isinstance(inner, Mapping) and isinstance(value, Mapping):
                merged_values[key] = merged(inner, value)
            else:
                merged_values[key] = value
    return merged_values
