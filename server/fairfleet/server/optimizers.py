"""Server optimizers: from a rule's direction to the step that the model takes, whatever the rule.

Parameters are frozen; what lasts from round to round is an `OptimizerState` of named vectors (as long as the
model) and numbers, which goes in and comes out and can be written as it is. Vectors are updated in place, block by
block: a state that was passed in is used up. `step` overwrites the direction with the step; model - step is new.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import DTypeLike
from pydantic import BaseModel, ConfigDict, Field, model_validator

from fairfleet.server.blocks import CHUNK, Chunk, Row, chunks, spread, workspace


@dataclass(frozen=True)
class OptimizerState:
    vectors: dict[str, Row] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)


class Optimizer(BaseModel):
    """A rate eta, how it falls over the rounds, and one pass over the direction."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    summary: ClassVar[str] = ""
    eta: float = Field(default=1.0, gt=0.0)
    schedule: Literal["constant", "exponential", "step", "inverse", "fedmgda"] = "constant"
    decay: float = Field(default=1.0, gt=0.0)
    every: int = Field(default=100, ge=1)
    rounds: int = Field(default=0, ge=0)  # of the whole training; the fedmgda schedule needs it

    @model_validator(mode="after")
    def _fedmgda_knows_the_end(self) -> Optimizer:
        if self.schedule == "fedmgda" and self.rounds == 0:
            raise ValueError("the fedmgda schedule needs rounds, the number of rounds of the whole training")
        return self

    def rate(self, round: int) -> float:
        """eta at this round."""
        match self.schedule:
            case "exponential":
                return float(self.eta * self.decay**round)
            case "step":
                return float(self.eta * self.decay ** (round // self.every))
            case "inverse":
                return self.eta / (1.0 + self.decay * round)
            case "fedmgda":  # FedMGDA+: falls to eta * decay over the training, in steps of 100 rounds
                return float(self.eta * self.decay ** (self.every / self.rounds * (round // self.every)))
        return self.eta

    def initial(self, size: int, dtype: DTypeLike = np.float32) -> OptimizerState:
        return OptimizerState()

    def step(self, direction: Row, state: OptimizerState, *, round: int = 0, certainty: float = 1.0) -> OptimizerState:
        """Overwrites the direction with the step to subtract from the model; returns the next state."""
        raise NotImplementedError


class SGD(Optimizer):
    """step = eta d, or eta M with M = gamma M + d (heavy_ball) or M = gamma M + (1 - gamma) d (ema)."""

    summary: ClassVar[str] = "the direction times eta, with momentum if asked"
    momentum: float = Field(default=0.0, ge=0.0, lt=1.0)
    form: Literal["heavy_ball", "ema"] = "heavy_ball"

    def initial(self, size: int, dtype: DTypeLike = np.float32) -> OptimizerState:
        return OptimizerState({"momentum": np.zeros(size, dtype)} if self.momentum else {})

    def step(self, direction: Row, state: OptimizerState, *, round: int = 0, certainty: float = 1.0) -> OptimizerState:
        rate, fresh = self.rate(round), 1.0 - self.momentum if self.form == "ema" else 1.0
        memory = state.vectors.get("momentum")

        def work(d: Row, m: Row | None = None) -> None:
            if m is not None:
                np.multiply(d, fresh, out=d)
                np.multiply(m, self.momentum, out=m)
                np.add(m, d, out=m)
                np.multiply(m, rate, out=d)
            else:
                np.multiply(d, rate, out=d)

        if memory is not None:
            in_blocks(work, direction, memory)
        elif rate != 1.0:
            in_blocks(work, direction)
        return state


class Adam(Optimizer):
    """m = b1 m + (1 - b1) d, v = b2 v + (1 - b2) d^2, step = eta m / (sqrt(v) + tau). Reddi et al., ICLR 2021."""

    summary: ClassVar[str] = "FedAdam: moments of the direction, element by element"
    eta: float = Field(default=0.01, gt=0.0)
    beta1: float = Field(default=0.9, ge=0.0, lt=1.0)
    beta2: float = Field(default=0.99, ge=0.0, lt=1.0)
    tau: float = Field(default=1e-3, gt=0.0)
    v0: float | None = Field(default=None, ge=0.0)  # None: tau squared
    bias_correction: bool = False

    def initial(self, size: int, dtype: DTypeLike = np.float32) -> OptimizerState:
        start = self.tau**2 if self.v0 is None else self.v0
        return OptimizerState({"m": np.zeros(size, dtype), "v": np.full(size, start, dtype)}, {"steps": 0.0})

    def step(self, direction: Row, state: OptimizerState, *, round: int = 0, certainty: float = 1.0) -> OptimizerState:
        steps = state.numbers["steps"] + 1.0
        first = 1.0 - self.beta1**steps if self.bias_correction else 1.0
        second = 1.0 - self.beta2**steps if self.bias_correction else 1.0
        rate = self.rate(round) / first

        def work(d: Row, m: Row, v: Row) -> None:
            spare = scratch(d)
            blend(m, d, self.beta1, 1.0 - self.beta1, spare)
            np.multiply(d, d, out=d)
            self.second_moment(v, d, spare)
            divide_by_root(m, v, second, self.tau, rate, out=d)

        in_blocks(work, direction, state.vectors["m"], state.vectors["v"])
        return OptimizerState(state.vectors, {"steps": steps})

    def second_moment(self, v: Row, square: Row, spare: Row) -> None:
        blend(v, square, self.beta2, 1.0 - self.beta2, spare)


class Yogi(Adam):
    """v = v - (1 - b2) d^2 sign(v - d^2): v grows fast and shrinks slowly."""

    summary: ClassVar[str] = "FedYogi: Adam whose second moment shrinks slowly"

    def second_moment(self, v: Row, square: Row, spare: Row) -> None:
        np.subtract(v, square, out=spare)
        np.sign(spare, out=spare)
        np.multiply(spare, square, out=spare)
        np.multiply(spare, 1.0 - self.beta2, out=spare)
        np.subtract(v, spare, out=v)


class Adagrad(Adam):
    """v = v + d^2"""

    summary: ClassVar[str] = "FedAdagrad: the sum of all squares"

    def second_moment(self, v: Row, square: Row, spare: Row) -> None:
        np.add(v, square, out=v)


class CertaintyAdam(Optimizer):
    """Adam whose decays are raised to the certainty C, with lr_t = C eta: AdaFedAdam's element-wise half."""

    summary: ClassVar[str] = "AdaFedAdam: Adam paced by the certainty of the clients' updates"
    eta: float = Field(default=1e-3, gt=0.0)
    beta1: float = Field(default=0.9, gt=0.0, lt=1.0)
    beta2: float = Field(default=0.999, gt=0.0, lt=1.0)
    eps: float = Field(default=1e-8, gt=0.0)
    lr_mode: Literal["certainty", "printed", "warmup"] = "certainty"

    def initial(self, size: int, dtype: DTypeLike = np.float32) -> OptimizerState:
        vectors: dict[str, Row] = {"m": np.zeros(size, dtype), "v": np.zeros(size, dtype)}
        return OptimizerState(vectors, {"c_m": 1.0, "c_v": 1.0, "steps": 0.0})

    def step(self, direction: Row, state: OptimizerState, *, round: int = 0, certainty: float = 1.0) -> OptimizerState:
        if certainty <= 0.0:  # no client was usable: nothing moves, nothing ages
            direction.fill(0.0)
            return state
        beta1, beta2 = self.beta1**certainty, self.beta2**certainty
        c_m, c_v = state.numbers["c_m"] * beta1, state.numbers["c_v"] * beta2
        rate = self.rate(round) * self.pace(certainty, state.numbers["steps"]) / (1.0 - c_m)

        def work(d: Row, m: Row, v: Row) -> None:
            spare = scratch(d)
            blend(m, d, beta1, 1.0 - beta1, spare)
            np.multiply(d, d, out=d)
            blend(v, d, beta2, 1.0 - beta2, spare)
            divide_by_root(m, v, 1.0 - c_v, self.eps, rate, out=d)

        in_blocks(work, direction, state.vectors["m"], state.vectors["v"])
        return OptimizerState(state.vectors, {"c_m": c_m, "c_v": c_v, "steps": state.numbers["steps"] + 1.0})

    def pace(self, certainty: float, steps: float) -> float:
        printed = self.lr_mode == "printed" or (self.lr_mode == "warmup" and steps < 6)
        return 1.0 if printed else certainty


OPTIMIZERS: dict[str, type[Optimizer]] = {
    "sgd": SGD,
    "adam": Adam,
    "yogi": Yogi,
    "adagrad": Adagrad,
    "certainty_adam": CertaintyAdam,
}


def blend(memory: Row, fresh: Row, keep: float, take: float, spare: Row) -> None:
    """memory = keep memory + take fresh, in place."""
    np.multiply(fresh, take, out=spare)
    np.multiply(memory, keep, out=memory)
    np.add(memory, spare, out=memory)


def divide_by_root(m: Row, v: Row, correction: float, floor: float, rate: float, *, out: Row) -> None:
    """out = rate m / (sqrt(v / correction) + floor)"""
    np.divide(v, correction, out=out)
    np.sqrt(out, out=out)
    np.add(out, floor, out=out)
    np.divide(m, out, out=out)
    np.multiply(out, rate, out=out)


def scratch(like: Row) -> Row:
    return np.asarray(workspace(CHUNK).view(like.dtype)[: len(like)])


def in_blocks(work: Callable[..., None], *vectors: Row) -> None:
    """The work on the same columns of every vector, block by block, on all cores."""

    def on(chunk: Chunk) -> None:
        work(*(vector[chunk.start : chunk.stop] for vector in vectors))

    spread(on, list(chunks([len(vectors[0])])))
