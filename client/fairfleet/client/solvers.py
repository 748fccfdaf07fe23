"""Local solvers on one flat numpy vector, step for step those of torch.optim.

For tasks without a framework. A solver keeps its own state (momentum, moments) for one training.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from fairfleet.common.plan import Plan
from fairfleet.common.tensors import Vector


class Solver(Protocol):
    def direction(self, gradient: Vector) -> Vector:
        """What to subtract, times the learning rate, given the gradient of this step."""


class Sgd:
    def __init__(self, size: int, momentum: float, nesterov: bool) -> None:
        self.momentum, self.nesterov = momentum, nesterov
        self.velocity = np.zeros(size, np.float32)

    def direction(self, gradient: Vector) -> Vector:
        self.velocity = self.momentum * self.velocity + gradient
        return gradient + self.momentum * self.velocity if self.nesterov else self.velocity


class Adam:
    mean_decay, square_decay, epsilon = 0.9, 0.999, 1e-8  # torch's defaults; the plan has no say in them

    def __init__(self, size: int) -> None:
        self.steps = 0
        self.mean = np.zeros(size, np.float32)
        self.square = np.zeros(size, np.float32)

    def direction(self, gradient: Vector) -> Vector:
        self.steps += 1
        self.mean = self.mean_decay * self.mean + (1 - self.mean_decay) * gradient
        self.square = self.square_decay * self.square + (1 - self.square_decay) * gradient**2
        mean = self.mean / (1 - self.mean_decay**self.steps)
        square = self.square / (1 - self.square_decay**self.steps)
        direction: Vector = mean / (np.sqrt(square) + np.float32(self.epsilon))
        return direction


class Descent:
    """Carries out a plan's solver; `parameters` is changed in place, the proximal term pulls them to `anchor`."""

    def __init__(self, plan: Plan, parameters: Vector, anchor: Vector) -> None:
        self.plan, self.parameters, self.anchor = plan, parameters, anchor.copy()
        size = parameters.size
        self.solver: Solver = Adam(size) if plan.solver == "adam" else Sgd(size, plan.momentum, plan.nesterov)

    def step(self, gradient: Vector) -> None:
        pull = self.plan.proximal_mu * (self.parameters - self.anchor)
        gradient = gradient + pull + self.plan.weight_decay * self.parameters
        self.parameters -= self.plan.learning_rate * self.solver.direction(gradient)
