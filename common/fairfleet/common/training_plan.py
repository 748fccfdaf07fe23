"""The plan of a client's local training in one round.

The server decides it, and the task on the client follows it. A plan that validates can be sent
over the wire and used for training in 32-bit floating point.
"""

from __future__ import annotations

import hashlib
from typing import Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    NonNegativeFloat,
    NonNegativeInt,
    field_validator,
    model_validator,
)

LossMeasurement = Literal["exact", "batches", "sampled", "none"]
EXACTNESS: tuple[LossMeasurement, ...] = ("none", "batches", "sampled", "exact")  # ascending

MAX_COUNT = 2**32 - 1  # the wire has 32 bits for a number of steps, epochs or samples
# Models are trained in 32-bit floating point: these are its smallest and largest normal numbers.
MIN_FLOAT32, MAX_FLOAT32 = 2.0**-126, (2 - 2.0**-23) * 2.0**127


class LossPlan(BaseModel):
    """How a training finds the losses of its report; by default both exactly.

    exact: over all training data, in a pass of its own. batches: without a pass of its own, the
    mean over the samples of the first pass's steps, each at the parameters before its step.
    sampled: over some samples, drawn at random. none: not measured.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    before: Literal["exact", "batches", "sampled"] = "exact"  # of the received model
    after: Literal["exact", "sampled", "none"] = "exact"  # of the trained model
    samples: NonNegativeInt = 0  # for `sampled`; 0, or more than there are, means all

    def measurement(self, wanted: LossMeasurement, available: int) -> LossMeasurement:
        """Return how to measure with this many samples: a sample of all of them is exact.

        >>> plan = LossPlan(before="sampled", samples=100)
        >>> plan.measurement(plan.before, 1000), plan.measurement(plan.before, 50)
        ('sampled', 'exact')
        """
        takes_all = not 0 < self.samples < available
        return "exact" if wanted == "sampled" and takes_all else wanted


EXACTLY = LossPlan()
NO_PASSES = LossPlan(before="batches", after="none")  # no pass over the data that only measures


class Plan(BaseModel):
    """Local training. Set `epochs` or `steps`, not both; the default is one epoch."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    epochs: NonNegativeInt = Field(
        default=0, le=MAX_COUNT, description="passes over the client's training data"
    )
    steps: NonNegativeInt = Field(
        default=0, le=MAX_COUNT, description="solver steps, independent of the amount of data"
    )
    batch_size: NonNegativeInt = Field(
        default=32, le=MAX_COUNT, description="samples per step; 0 uses all samples at once"
    )
    learning_rate: FiniteFloat = Field(
        default=0.1, gt=0, description="learning rate of the client's solver"
    )
    learning_rate_decay: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="factor on the learning rate per round: round t has learning_rate * decay^t. "
        "The server applies it, so clients receive the rate of their round",
    )
    solver: Literal["sgd", "adam"] = Field(default="sgd", description="the client's solver")
    momentum: float = Field(default=0.0, ge=0, lt=1, description="momentum of sgd")
    nesterov: bool = Field(default=False, description="use Nesterov momentum in sgd")
    weight_decay: NonNegativeFloat = Field(
        default=0.0, description="weight of the L2 penalty in each step"
    )
    proximal_mu: NonNegativeFloat = Field(
        default=0.0, description="FedProx: weight of the pull to the received model"
    )
    personal_lambda: NonNegativeFloat = Field(
        default=0.0,
        description="Ditto: above 0, each client also trains a personal model; this is the "
        "weight of its pull to the global model",
    )
    seed: NonNegativeInt = Field(default=0, lt=2**64, description="seed of the order of batches")

    @field_validator("learning_rate", "weight_decay", "proximal_mu", "personal_lambda")
    @classmethod
    def _fits_float32(cls, value: float) -> float:
        if value and not MIN_FLOAT32 <= value <= MAX_FLOAT32:
            raise ValueError(
                f"must be between {MIN_FLOAT32:.2g} and {MAX_FLOAT32:.2g}: models are trained in "
                "32-bit floating point, where it becomes 0 or infinity. "
                "Give a usual value, for example a learning rate of 0.1"
            )
        return value

    @model_validator(mode="after")
    def _check_length_and_momentum(self) -> Plan:
        if self.epochs and self.steps:
            raise ValueError(
                "give epochs or steps, not both "
                f"(found epochs {self.epochs} and steps {self.steps})"
            )
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs momentum above 0")
        return self

    def for_round(self, round_number: int) -> Plan:
        """Return this plan with the learning rate of one round, to which no decay applies again.

        The rate never falls below the smallest that 32-bit floating point can hold.

        >>> plan = Plan(learning_rate=0.5, learning_rate_decay=0.5).for_round(2)
        >>> plan.learning_rate, plan.learning_rate_decay
        (0.125, 1.0)
        """
        decayed = self.learning_rate * self.learning_rate_decay**round_number
        rate = max(decayed, MIN_FLOAT32)
        return self.model_copy(update={"learning_rate": rate, "learning_rate_decay": 1.0})

    def for_client(self, client: str, round_number: int) -> Plan:
        """Return this plan with the learning rate of one round, and one client's batch seed in it.

        Another client or round gets other batches; a repetition gets the same ones.
        """
        digest = hashlib.sha256(f"{self.seed}/{round_number}/{client}".encode()).digest()
        seed = int.from_bytes(digest[:8], "big")
        return self.for_round(round_number).model_copy(update={"seed": seed})

    def steps_for(self, samples: int) -> int:
        """Return the number of solver steps of a client with this number of samples."""
        return self.steps or max(self.epochs, 1) * self.batches_in_epoch(samples)

    def batches_in_epoch(self, samples: int) -> int:
        """Return the number of batches in one pass over this number of samples.

        A last batch of a single sample joins the batch before it, because batch normalisation
        cannot train on one sample.
        """
        if not samples:
            return 0
        full_batches, remainder = divmod(samples, min(self.batch_size or samples, samples))
        return full_batches + (remainder > 1)
