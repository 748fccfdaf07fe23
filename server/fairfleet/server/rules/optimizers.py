"""Server optimizers: they turn a rule's direction into the step that the model takes.

Parameters are frozen. What lasts from round to round is an `OptimizerState`, which goes in and
comes out and can be written to disk as it is. `step` overwrites the direction with the step and
returns a new state. It does not change the given state, so a step that is not taken leaves no
trace. Two sets of vectors alternate: a state may be used until a step is made from its successor.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import DTypeLike
from pydantic import BaseModel, ConfigDict, Field, model_validator

from fairfleet.server.gram import Row
from fairfleet.server.rules.optimizer_vectors import (
    OptimizerState,
    blend,
    divide_by_root,
    next_moments,
    run_in_blocks,
    scratch,
)


class Optimizer(BaseModel):
    """A learning rate eta, its schedule over the rounds, and one pass over the direction.

    Subclass it and implement `step`; override `initial` if the optimizer remembers anything. With
    t = round number, the schedules are: exponential eta decay^t, step eta decay^floor(t / every),
    inverse eta / (1 + decay t), and fedmgda eta decay^(every / rounds floor(t / every)).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    summary: ClassVar[str] = ""
    eta: float = Field(default=1.0, gt=0.0)
    schedule: Literal["constant", "exponential", "step", "inverse", "fedmgda"] = "constant"
    decay: float = Field(default=1.0, gt=0.0)
    every: int = Field(default=100, ge=1)
    rounds: int = Field(default=0, ge=0)  # of the complete training; the fedmgda schedule needs it

    @model_validator(mode="after")
    def _check_fedmgda_rounds(self) -> Optimizer:
        if self.schedule == "fedmgda" and self.rounds == 0:
            raise ValueError(
                "the fedmgda schedule needs rounds, the number of rounds of the whole training"
            )
        return self

    def rate(self, round_number: int) -> float:
        """Return the learning rate of this round."""
        match self.schedule:
            case "exponential":
                return float(self.eta * self.decay**round_number)
            case "step":
                return float(self.eta * self.decay ** (round_number // self.every))
            case "inverse":
                return self.eta / (1.0 + self.decay * round_number)
            case "fedmgda":  # FedMGDA+: falls to eta * decay over the training, in steps
                steps = self.every / self.rounds * (round_number // self.every)
                return float(self.eta * self.decay**steps)
        return self.eta

    def is_identity(self, round_number: int) -> bool:
        """Return whether the step of this round is the direction itself."""
        return False

    def initial(self, size: int, dtype: DTypeLike = np.float32) -> OptimizerState:
        """Return the state before the first round, for a model with `size` parameters."""
        return OptimizerState()

    def step(
        self,
        direction: Row,
        state: OptimizerState,
        *,
        round_number: int = 0,
        certainty: float = 1.0,
    ) -> OptimizerState:
        """Overwrite the direction with the step to subtract from the model; return the next state.

        The given state must not be changed: the step may still be shortened to nothing, or refused
        because it is not finite. `certainty` comes from the rule (`Step.certainty`).
        """
        raise NotImplementedError


class SGD(Optimizer):
    """step = eta d, or step = eta M with momentum gamma.

    M = gamma M + d (heavy_ball) or M = gamma M + (1 - gamma) d (ema).
    """

    summary: ClassVar[str] = "the direction times eta, with optional momentum"
    momentum: float = Field(default=0.0, ge=0.0, lt=1.0)
    form: Literal["heavy_ball", "ema"] = "heavy_ball"

    def is_identity(self, round_number: int) -> bool:
        """Return whether there is no momentum and eta is one. A subclass may do anything."""
        return type(self).step is SGD.step and not self.momentum and self.rate(round_number) == 1.0

    def initial(self, size: int, dtype: DTypeLike = np.float32) -> OptimizerState:
        """Return a momentum of zero, or an empty state without momentum."""
        return OptimizerState({"momentum": np.zeros(size, dtype)} if self.momentum else {})

    def step(
        self,
        direction: Row,
        state: OptimizerState,
        *,
        round_number: int = 0,
        certainty: float = 1.0,
    ) -> OptimizerState:
        """Overwrite the direction with eta d, or eta M; return the next state."""
        rate = self.rate(round_number)
        memory = state.vectors.get("momentum")
        if memory is not None:
            return self._step_with_momentum(direction, memory, state, rate)

        def multiply(d: Row) -> None:
            np.multiply(d, rate, out=d)

        return replace(state, is_finite=rate != 1.0 and run_in_blocks(multiply, direction))

    def _step_with_momentum(
        self, direction: Row, memory: Row, state: OptimizerState, rate: float
    ) -> OptimizerState:
        fresh = 1.0 - self.momentum if self.form == "ema" else 1.0

        def add_momentum(d: Row, m: Row, next_m: Row) -> None:
            np.multiply(d, fresh, out=d)
            np.multiply(m, self.momentum, out=next_m)
            np.add(next_m, d, out=next_m)
            np.multiply(next_m, rate, out=d)

        next_memory = state.buffer("momentum")
        finite = run_in_blocks(add_momentum, direction, memory, next_memory)
        return OptimizerState(
            {"momentum": next_memory}, state.numbers, spare=state.vectors, is_finite=finite
        )


class Adam(Optimizer):
    """FedAdam: m = b1 m + (1 - b1) d, v = b2 v + (1 - b2) d^2, step = eta m / (sqrt(v) + tau).

    Reddi et al., ICLR 2021.
    """

    summary: ClassVar[str] = "FedAdam: moments of the direction, element by element"
    eta: float = Field(default=0.01, gt=0.0)
    beta1: float = Field(default=0.9, ge=0.0, lt=1.0)
    beta2: float = Field(default=0.99, ge=0.0, lt=1.0)
    tau: float = Field(default=1e-3, gt=0.0)
    v0: float | None = Field(default=None, ge=0.0)  # None: tau squared
    bias_correction: bool = False

    def initial(self, size: int, dtype: DTypeLike = np.float32) -> OptimizerState:
        """Return m = 0 and v = v0."""
        start = self.tau**2 if self.v0 is None else self.v0
        return OptimizerState(
            {"m": np.zeros(size, dtype), "v": np.full(size, start, dtype)}, {"steps": 0.0}
        )

    def step(
        self,
        direction: Row,
        state: OptimizerState,
        *,
        round_number: int = 0,
        certainty: float = 1.0,
    ) -> OptimizerState:
        """Overwrite the direction with the step; return the next moments."""
        steps = state.numbers["steps"] + 1.0
        first = 1.0 - self.beta1**steps if self.bias_correction else 1.0
        second = 1.0 - self.beta2**steps if self.bias_correction else 1.0
        rate = self.rate(round_number) / first

        def update(d: Row, m: Row, v: Row, next_m: Row, next_v: Row) -> None:
            spare = scratch(d)
            blend(m, d, self.beta1, 1.0 - self.beta1, spare, out=next_m)
            np.multiply(d, d, out=d)
            self.second_moment(v, d, spare, out=next_v)
            divide_by_root(next_m, next_v, second, self.tau, rate, out=d)

        moments, finite = next_moments(update, direction, state)
        return OptimizerState(moments, {"steps": steps}, spare=state.vectors, is_finite=finite)

    def second_moment(self, v: Row, square: Row, spare: Row, *, out: Row) -> None:
        """Compute the next v from v and d^2; `spare` is scratch memory."""
        blend(v, square, self.beta2, 1.0 - self.beta2, spare, out=out)


class Yogi(Adam):
    """FedYogi: v = v - (1 - b2) d^2 sign(v - d^2), so v grows fast and shrinks slowly."""

    summary: ClassVar[str] = "FedYogi: Adam whose second moment shrinks slowly"

    def second_moment(self, v: Row, square: Row, spare: Row, *, out: Row) -> None:
        """Compute the next v = v - (1 - b2) d^2 sign(v - d^2)."""
        np.subtract(v, square, out=spare)
        np.sign(spare, out=spare)
        np.multiply(spare, square, out=spare)
        np.multiply(spare, 1.0 - self.beta2, out=spare)
        np.subtract(v, spare, out=out)


class Adagrad(Adam):
    """FedAdagrad: v = v + d^2."""

    summary: ClassVar[str] = "FedAdagrad: the sum of all squares"

    def second_moment(self, v: Row, square: Row, spare: Row, *, out: Row) -> None:
        """Compute the next v = v + d^2."""
        np.add(v, square, out=out)


class AMSGrad(Adam):
    """FedAMSGrad: step = eta m / (sqrt(h) + tau), where h is the largest v so far.

    Tong, Liang, Bi: Effective Federated Adaptive Gradient Methods with Non-IID Decentralized
    Data, 2020. Rates never grow again, as they do in Adam after a quiet time.
    """

    summary: ClassVar[str] = "FedAMSGrad: Adam whose rates never grow"

    def initial(self, size: int, dtype: DTypeLike = np.float32) -> OptimizerState:
        """Return m = 0, v = v0 and h = v0."""
        state = super().initial(size, dtype)
        return replace(state, vectors={**state.vectors, "h": state.vectors["v"].copy()})

    def step(
        self,
        direction: Row,
        state: OptimizerState,
        *,
        round_number: int = 0,
        certainty: float = 1.0,
    ) -> OptimizerState:
        """Overwrite the direction with the step; return the next moments and their maximum."""
        steps = state.numbers["steps"] + 1.0
        first = 1.0 - self.beta1**steps if self.bias_correction else 1.0
        second = 1.0 - self.beta2**steps if self.bias_correction else 1.0
        rate = self.rate(round_number) / first

        def update(d: Row, m: Row, v: Row, h: Row, next_m: Row, next_v: Row, next_h: Row) -> None:
            spare = scratch(d)
            blend(m, d, self.beta1, 1.0 - self.beta1, spare, out=next_m)
            np.multiply(d, d, out=d)
            self.second_moment(v, d, spare, out=next_v)
            np.maximum(h, next_v, out=next_h)
            divide_by_root(next_m, next_h, second, self.tau, rate, out=d)

        after = {name: state.buffer(name) for name in ("m", "v", "h")}
        before = (state.vectors[name] for name in after)
        finite = run_in_blocks(update, direction, *before, *after.values(), results=(0, 6))
        return OptimizerState(after, {"steps": steps}, spare=state.vectors, is_finite=finite)


class CertaintyAdam(Optimizer):
    """Adam whose decays are raised to the certainty C, with the learning rate C eta.

    It is the element-wise half of AdaFedAdam. `lr_mode` printed uses eta as in the paper's text;
    warmup uses it for the first six steps.
    """

    summary: ClassVar[str] = "AdaFedAdam: Adam paced by the certainty of the clients' updates"
    eta: float = Field(default=1e-3, gt=0.0)
    beta1: float = Field(default=0.9, gt=0.0, lt=1.0)
    beta2: float = Field(default=0.999, gt=0.0, lt=1.0)
    eps: float = Field(default=1e-8, gt=0.0)
    lr_mode: Literal["certainty", "printed", "warmup"] = "certainty"

    def initial(self, size: int, dtype: DTypeLike = np.float32) -> OptimizerState:
        """Return moments of zero, and decay products of one."""
        vectors: dict[str, Row] = {"m": np.zeros(size, dtype), "v": np.zeros(size, dtype)}
        return OptimizerState(vectors, {"c_m": 1.0, "c_v": 1.0, "steps": 0.0})

    def step(
        self,
        direction: Row,
        state: OptimizerState,
        *,
        round_number: int = 0,
        certainty: float = 1.0,
    ) -> OptimizerState:
        """Overwrite the direction with the step; return the next moments.

        A certainty of zero means that no client was usable: the step is zero, the state unchanged.
        """
        if certainty <= 0.0:
            direction.fill(0.0)
            return replace(state, is_finite=True)
        beta1, beta2 = self.beta1**certainty, self.beta2**certainty
        c_m, c_v = state.numbers["c_m"] * beta1, state.numbers["c_v"] * beta2
        rate = self.rate(round_number) * self.pace(certainty, state.numbers["steps"]) / (1.0 - c_m)

        def update(d: Row, m: Row, v: Row, next_m: Row, next_v: Row) -> None:
            spare = scratch(d)
            blend(m, d, beta1, 1.0 - beta1, spare, out=next_m)
            np.multiply(d, d, out=d)
            blend(v, d, beta2, 1.0 - beta2, spare, out=next_v)
            divide_by_root(next_m, next_v, 1.0 - c_v, self.eps, rate, out=d)

        numbers = {"c_m": c_m, "c_v": c_v, "steps": state.numbers["steps"] + 1.0}
        moments, finite = next_moments(update, direction, state)
        return OptimizerState(moments, numbers, spare=state.vectors, is_finite=finite)

    def pace(self, certainty: float, steps: float) -> float:
        """Return the factor of the learning rate: the certainty, or one (see `lr_mode`)."""
        printed = self.lr_mode == "printed" or (self.lr_mode == "warmup" and steps < 6)
        return 1.0 if printed else certainty


OPTIMIZERS: dict[str, type[Optimizer]] = {
    "sgd": SGD,
    "adam": Adam,
    "yogi": Yogi,
    "adagrad": Adagrad,
    "amsgrad": AMSGrad,
    "certainty_adam": CertaintyAdam,
}
