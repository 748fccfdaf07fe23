"""The settings of a round: which clients are selected for it, and when it ends."""

from __future__ import annotations

from typing import Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
)

from fairfleet.common.features import FEATURES
from fairfleet.server.rounds.selection import Selection


class RoundSettings(BaseModel):
    """How clients are selected for a round, and when the round ends."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    minimum_clients: PositiveInt = Field(
        default=2, description="minimum number of connected clients to start a round"
    )
    clients: NonNegativeInt = Field(default=0, description="clients selected per round; 0: all")
    selection: Selection = Field(
        default="uniform", description="how clients are selected, if not all are"
    )
    over_selection: float = Field(
        default=1.0, ge=1, description="select this many times more clients, use the first updates"
    )
    quorum: float = Field(
        default=0.8, gt=0, le=1, description="share of updates that suffices at the deadline"
    )
    tolerate_missing: NonNegativeInt | None = Field(
        default=None,
        description="instead of quorum: number of updates that may be missing at the deadline",
    )
    deadline: Literal["fixed", "adaptive"] = Field(
        default="fixed",
        description="adaptive: derived from past training times, at most deadline_seconds",
    )
    deadline_seconds: PositiveFloat = Field(
        default=600.0, description="time for training and upload in one round"
    )
    shortest_deadline_seconds: PositiveFloat = Field(
        default=10.0, description="adaptive: the deadline is never shorter than this"
    )
    deadline_factor: float = Field(
        default=3.0, ge=1, description="adaptive: multiple of the time within which 9 of 10 finish"
    )
    longest_wait_seconds: PositiveFloat | None = Field(
        default=None,
        description="stop after too few clients for this long; default: wait indefinitely",
    )
    evaluate_every: NonNegativeInt = Field(
        default=10, description="rounds between evaluations; the last is evaluated too; 0: never"
    )
    evaluation_clients: NonNegativeInt = Field(
        default=0, description="clients drawn at random per evaluation; 0: all"
    )
    evaluation_deadline_seconds: PositiveFloat = Field(
        default=120.0, description="time for the clients' evaluations of a version"
    )
    required_features: tuple[str, ...] = Field(
        default=(),
        description="features that a client must have to be selected, besides those that the "
        "settings need; see proto/FEATURES.md",
    )

    @field_validator("required_features")
    @classmethod
    def _known_features(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if unknown := sorted(set(names) - set(FEATURES)):
            raise ValueError(
                f"no feature is called {unknown[0]!r}; this server knows {', '.join(FEATURES)}"
            )
        return names
