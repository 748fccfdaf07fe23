"""What clients say beside their updates. Both sides check it: a report with a NaN never reaches a rule."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, NonNegativeInt

Limit = Annotated[str, Field(max_length=32)]  # steps, seconds, memory; later clients may know others


class TrainReport(BaseModel):
    model_config = ConfigDict(frozen=True)

    samples: NonNegativeInt
    loss_before: FiniteFloat = Field(description="of the received model on the training data")
    loss_after: FiniteFloat
    steps: NonNegativeInt = Field(description="taken; fewer than planned is allowed")
    learning_rate: FiniteFloat = Field(ge=0)
    gradient_norm: FiniteFloat | None = Field(default=None, ge=0, description="at the received model, when asked for")
    seconds: FiniteFloat = Field(default=0.0, ge=0)
    accuracy: float | None = Field(default=None, ge=0, le=1, description="of the received model on the training data")
    planned_steps: NonNegativeInt = Field(default=0, description="0: not said")
    batch_size: NonNegativeInt = Field(default=0, description="samples per step; 0: not said")
    cut_by: tuple[Limit, ...] = Field(default=(), max_length=8, description="what of the machine's budget was short")


class Evaluation(BaseModel):
    model_config = ConfigDict(frozen=True)

    samples: NonNegativeInt
    loss: FiniteFloat
    accuracy: float | None = Field(default=None, ge=0, le=1)
    personal_loss: FiniteFloat | None = None  # of the client's personal model, where it has one
    personal_accuracy: float | None = Field(default=None, ge=0, le=1)
