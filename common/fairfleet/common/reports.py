"""The numbers that clients report together with their updates.

Client and server both validate them, so a report with a NaN never reaches an aggregation rule.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, NonNegativeInt

# The name of a limit: steps, seconds or memory. Later clients may know others.
Limit = Annotated[str, Field(max_length=32)]

# The largest magnitude of a reported loss. Its square is far from the limits of float64.
MAX_LOSS = 1e30


class TrainReport(BaseModel):
    """A client's report on its local training in one round."""

    model_config = ConfigDict(frozen=True)

    samples: NonNegativeInt
    loss_before: FiniteFloat = Field(description="loss of the received model on the training data")
    loss_after: FiniteFloat | None = Field(
        default=None, description="loss of the trained model; None: not measured"
    )
    steps: NonNegativeInt = Field(description="steps made; may be fewer than planned")
    learning_rate: FiniteFloat = Field(ge=0)
    gradient_norm: FiniteFloat | None = Field(
        default=None, ge=0, description="gradient norm at the received model, if requested"
    )
    seconds: FiniteFloat = Field(default=0.0, ge=0)
    accuracy: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="accuracy of the received model on the training data",
    )
    loss_measurement: Literal["exact", "batches", "sampled"] = Field(
        default="exact", description="how loss_before was measured, see LossPlan"
    )
    loss_standard_error: FiniteFloat | None = Field(
        default=None, ge=0, description="of loss_before, if it is that of a sample"
    )
    planned_steps: NonNegativeInt = Field(default=0, description="0: not reported")
    batch_size: NonNegativeInt = Field(default=0, description="samples per step; 0: not reported")
    cut_by: tuple[Limit, ...] = Field(
        default=(),
        max_length=8,
        description="limits of the machine's budget that shortened the training",
    )


class Evaluation(BaseModel):
    """A client's evaluation of a model version on its own data."""

    model_config = ConfigDict(frozen=True)

    samples: NonNegativeInt
    loss: FiniteFloat
    accuracy: float | None = Field(default=None, ge=0, le=1)
    personal_loss: FiniteFloat | None = None  # of the client's personal model, if it has one
    personal_accuracy: float | None = Field(default=None, ge=0, le=1)
