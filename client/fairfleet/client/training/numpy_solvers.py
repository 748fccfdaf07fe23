"""Local solvers on one flat numpy vector, step for step equal to those of torch.optim.

They are for tasks without a framework. A solver keeps its own state (momentum, moments) for one
training.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from fairfleet.common.tensors import Vector
from fairfleet.common.training_plan import Plan


class NumpySolver(Protocol):
    """A solver: it turns the gradient of a step into the direction of the step."""

    def direction(self, gradient: Vector) -> Vector:
        """Return the vector that, times the learning rate, is subtracted from the parameters."""


class NumpySgd:
    """Stochastic gradient descent with optional (Nesterov) momentum."""

    def __init__(self, size: int, momentum: float, nesterov: bool) -> None:
        self.momentum, self.nesterov = momentum, nesterov
        self.velocity = np.zeros(size, np.float32)

    def direction(self, gradient: Vector) -> Vector:
        """Return the direction of this step and update the velocity."""
        if not self.momentum:
            return gradient
        self.velocity = self.momentum * self.velocity + gradient
        return gradient + self.momentum * self.velocity if self.nesterov else self.velocity


class NumpyAdam:
    """Adam with torch's default constants, which the plan cannot change."""

    mean_decay, square_decay, epsilon = 0.9, 0.999, 1e-8

    def __init__(self, size: int) -> None:
        self.steps = 0
        self.mean = np.zeros(size, np.float32)
        self.square = np.zeros(size, np.float32)

    def direction(self, gradient: Vector) -> Vector:
        """Return the direction of this step and update the moments."""
        self.steps += 1
        self.mean = self.mean_decay * self.mean + (1 - self.mean_decay) * gradient
        self.square = self.square_decay * self.square + (1 - self.square_decay) * gradient**2
        mean = self.mean / (1 - self.mean_decay**self.steps)
        square = self.square / (1 - self.square_decay**self.steps)
        direction: Vector = mean / (np.sqrt(square) + np.float32(self.epsilon))
        return direction


class Descent:
    """The plan's solver at work on one parameter vector.

    `parameters` is changed in place. The proximal term pulls it towards a copy of `anchor`.
    """

    def __init__(self, plan: Plan, parameters: Vector, anchor: Vector) -> None:
        self.plan, self.parameters, self.anchor = plan, parameters, anchor.copy()
        size = parameters.size
        self.solver: NumpySolver = (
            NumpyAdam(size)
            if plan.solver == "adam"
            else NumpySgd(size, plan.momentum, plan.nesterov)
        )

    def step(self, gradient: Vector) -> None:
        """Take one step, given the gradient of the loss on this step's batch."""
        if self.plan.proximal_mu:
            gradient = gradient + self.plan.proximal_mu * (self.parameters - self.anchor)
        if self.plan.weight_decay:
            gradient = gradient + self.plan.weight_decay * self.parameters
        self.parameters -= self.plan.learning_rate * self.solver.direction(gradient)
