"""The numbers that clients report together with their updates.

Client and server both validate them, so a report with a NaN never reaches an aggregation rule.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    NonNegativeInt,
    model_validator,
)

from fairfleet.common.errors import short

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
    initial_loss: FiniteFloat | None = Field(
        default=None,
        description="loss of the federation's initial model on all training data, if requested",
    )
    planned_steps: NonNegativeInt = Field(default=0, description="0: not reported")
    batch_size: NonNegativeInt = Field(default=0, description="samples per step; 0: not reported")
    cut_by: tuple[Limit, ...] = Field(
        default=(),
        max_length=8,
        description="limits of the machine's budget that shortened the training",
    )


Better = Literal["higher", "lower"]  # which values of a measure are better

MAX_MEASURES = 16  # of one evaluation, beside loss and accuracy
MEASURE_NAME = r"[a-z][a-z0-9_]{0,31}"
# Measures that have fields of their own, with their directions.
BUILT_IN: Mapping[str, Better] = {"loss": "lower", "accuracy": "higher"}


def check_measure_name(name: str) -> str:
    """Return the name of a measure; raise ValueError if it has another form or is reserved."""
    if not re.fullmatch(MEASURE_NAME, name):
        raise ValueError(
            f"{short(name)!r} cannot name a measure; expected 1 to 32 of a-z, 0-9 and _, "
            "beginning with a letter"
        )
    if name in BUILT_IN:
        raise ValueError(f"{name} is no name for a measure: it has a field of its own")
    return name


class Measure(BaseModel):
    """A figure that a task computes of a model, and which values of it are better."""

    model_config = ConfigDict(frozen=True)

    value: FiniteFloat
    direction: Better


def higher(value: float) -> Measure:
    """Return a measure of which higher values are better, such as AUC or F1."""
    return Measure(value=float(value), direction="higher")


def lower(value: float) -> Measure:
    """Return a measure of which lower values are better, such as MAE or perplexity."""
    return Measure(value=float(value), direction="lower")


MeasureName = Annotated[str, AfterValidator(check_measure_name)]
Measures = Annotated[dict[MeasureName, Measure], Field(max_length=MAX_MEASURES)]


class Evaluation(BaseModel):
    """A client's evaluation of a model version on its own data.

    It has a loss, an accuracy or at least one of `measures`, which the task names itself:
    `Evaluation(samples=90, measures={"auc": higher(0.93), "mae": lower(2.1)})`.
    """

    model_config = ConfigDict(frozen=True)

    samples: NonNegativeInt
    loss: FiniteFloat | None = None
    accuracy: float | None = Field(default=None, ge=0, le=1)
    personal_loss: FiniteFloat | None = None  # of the client's personal model, if it has one
    personal_accuracy: float | None = Field(default=None, ge=0, le=1)
    measures: Measures = {}
    personal_measures: Measures = {}  # of the personal model

    @model_validator(mode="after")
    def _has_a_figure(self) -> Evaluation:
        if self.loss is None and self.accuracy is None and not self.measures:
            raise ValueError(
                "it has no figure; expected a loss, an accuracy or at least one of measures"
            )
        return self

    def figures(self) -> dict[str, Measure]:
        """Return every figure of the federation's model by name, loss and accuracy included."""
        built_in = {
            name: Measure(value=value, direction=direction)
            for name, direction in BUILT_IN.items()
            if (value := getattr(self, name)) is not None
        }
        return built_in | self.measures

    def figure(self, name: str) -> float | None:
        """Return the value of a measure by its name; None without it."""
        if name in BUILT_IN:
            value: float | None = getattr(self, name)
            return value
        return self.measures[name].value if name in self.measures else None
