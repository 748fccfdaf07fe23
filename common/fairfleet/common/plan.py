"""How a client trains in one round: decided by the server, carried out by the task."""

from __future__ import annotations

import hashlib
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, NonNegativeFloat, NonNegativeInt, model_validator


class Plan(BaseModel):
    """Local training. Set `epochs` or `steps`, not both; without either it is one epoch."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    epochs: NonNegativeInt = Field(default=0, description="passes over the client's training data")
    steps: NonNegativeInt = Field(default=0, description="solver steps, however much data that is")
    batch_size: NonNegativeInt = Field(default=32, description="samples per step; 0 takes all at once")
    learning_rate: FiniteFloat = Field(default=0.1, gt=0)
    solver: Literal["sgd", "adam"] = "sgd"
    momentum: float = Field(default=0.0, ge=0, lt=1, description="of sgd")
    nesterov: bool = Field(default=False, description="sgd's momentum looks ahead")
    weight_decay: NonNegativeFloat = 0.0
    proximal_mu: NonNegativeFloat = Field(default=0.0, description="FedProx: weight of the pull to the received model")
    personal_lambda: NonNegativeFloat = Field(
        default=0.0, description="Ditto: above 0, each client also trains a personal model, pulled so to the global one"
    )
    seed: NonNegativeInt = Field(default=0, lt=2**64, description="of the batches")

    @model_validator(mode="after")
    def _one_length(self) -> Plan:
        if self.epochs and self.steps:
            raise ValueError(f"give epochs or steps, not both (found epochs {self.epochs} and steps {self.steps})")
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs momentum above 0")
        return self

    def for_client(self, client: str, round_number: int) -> Plan:
        """The same plan with batches of its own: another client or round draws others, a repeat draws the same."""
        mixed = hashlib.sha256(f"{self.seed}/{round_number}/{client}".encode()).digest()
        return self.model_copy(update={"seed": int.from_bytes(mixed[:8], "big")})

    def steps_for(self, samples: int) -> int:
        """How many solver steps this plan means for a client with so many samples."""
        return self.steps or max(self.epochs, 1) * self.batches_in_epoch(samples)

    def batches_in_epoch(self, samples: int) -> int:
        """A last batch of a single sample joins the one before it: batch normalisation cannot train on one."""
        if not samples:
            return 0
        whole, rest = divmod(samples, min(self.batch_size or samples, samples))
        return whole + (rest > 1)
