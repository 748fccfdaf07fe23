"""The settings of FedCorr's label correction, with the names of its paper in the descriptions."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveInt

Share = Annotated[float, Field(ge=0, le=1)]


class LabelCorrection(BaseModel):
    """FedCorr's first two stages, which come before the rounds of the experiment."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    iterations: PositiveInt = Field(
        default=5,
        description="passes over all clients, one client after another, in which noise levels are "
        "estimated and labels corrected (T1)",
    )
    rounds: NonNegativeInt = Field(
        default=20,
        description="rounds of FedAvg among the clean clients, before the last correction (T2)",
    )
    proximal: NonNegativeFloat = Field(
        default=5.0,
        description="weight of the pull to the received model, times the client's estimated noise "
        "level (beta)",
    )
    relabel_share: Share = Field(
        default=0.5, description="share of the suspected labels that an iteration reviews (pi)"
    )
    confidence: Share = Field(
        default=0.5,
        description="a label is replaced if the model is more certain than this (theta)",
    )
    clean_level: Share = Field(
        default=0.1, description="highest estimated noise level of a clean client (kappa)"
    )
    neighbours: int = Field(
        default=20,
        ge=2,
        description="neighbouring predictions from which a client's dimension is estimated (k)",
    )
