"""A plan's local solver on the stacked weights of many clients, step for step as in torch.optim.

Each client of a stack has its own state (momentum, moments). Clients with fewer steps are further
back in the stack, so those that still train are always the first ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from fairfleet.common.training_plan import Plan
from fairfleet.lab.simulation.dense_network import LayerGradient, StackedWeights

MEAN_DECAY, SQUARE_DECAY, EPSILON = 0.9, 0.999, 1e-8  # torch's defaults for Adam


class BatchedSolver(Protocol):
    """A local solver that changes a stack of weights in place."""

    def step(self, gradients: Iterable[LayerGradient]) -> None:
        """Take one step for the clients of these gradients, the first ones of the stack."""


def solver_for(plan: Plan, stack: StackedWeights) -> BatchedSolver:
    """Return the plan's solver for this stack."""
    plain = plan.solver == "sgd" and not (plan.momentum or plan.weight_decay or plan.proximal_mu)
    return PlainSgd(plan.learning_rate, stack) if plain else GeneralSolver(plan, stack)


class PlainSgd:
    """SGD without momentum. Product and step are one call, so no gradient tensor is needed."""

    def __init__(self, rate: float, stack: StackedWeights) -> None:
        self.rate, self.stack = rate, stack

    def step(self, gradients: Iterable[LayerGradient]) -> None:
        """Take one step for the clients of these gradients, the first ones of the stack."""
        for gradient in gradients:
            error, layer = gradient.error, gradient.layer
            weight = self.stack.weights[layer][: len(error)]
            bias = self.stack.biases[layer][: len(error)]
            weight.baddbmm_(error.transpose(1, 2), gradient.input, alpha=-self.rate)
            if self.stack.network.layers[layer].bias:
                bias.sub_(gradient.bias(), alpha=self.rate)


class GeneralSolver:
    """SGD with or without (Nesterov) momentum, or Adam.

    Weight decay and the proximal term, which pulls towards the received model, are included.
    """

    def __init__(self, plan: Plan, stack: StackedWeights) -> None:
        self.plan, self.stack = plan, stack
        self.received = (
            {id(p): p[:1].clone() for p in (*stack.weights, *stack.biases)}
            if plan.proximal_mu
            else {}
        )
        self.memory: dict[int, tuple[Tensor, Tensor]] = {}  # by the id of the stacked parameter
        self.steps = 0

    def step(self, gradients: Iterable[LayerGradient]) -> None:
        """Take one step for the clients of these gradients, the first ones of the stack."""
        self.steps += 1
        for gradient in gradients:
            self._move(self.stack.weights[gradient.layer], gradient.weight())
            if self.stack.network.layers[gradient.layer].bias:
                self._move(self.stack.biases[gradient.layer], gradient.bias())

    def _move(self, stacked: Tensor, gradient: Tensor) -> None:
        key, active = id(stacked), stacked[: len(gradient)]
        if self.plan.proximal_mu:
            gradient.add_(active - self.received[key], alpha=self.plan.proximal_mu)
        if self.plan.weight_decay:
            gradient.add_(active, alpha=self.plan.weight_decay)
        active.sub_(self._direction(key, gradient), alpha=self.plan.learning_rate)

    def _direction(self, key: int, gradient: Tensor) -> Tensor:
        if self.plan.solver == "adam":
            return self._adam(key, gradient)
        if not self.plan.momentum:
            return gradient
        if key not in self.memory:
            self.memory[key] = (gradient.clone(), gradient)
            velocity = self.memory[key][0]
        else:
            velocity = self.memory[key][0][: len(gradient)].mul_(self.plan.momentum).add_(gradient)
        return gradient.add(velocity, alpha=self.plan.momentum) if self.plan.nesterov else velocity

    def _adam(self, key: int, gradient: Tensor) -> Tensor:
        if key not in self.memory:
            self.memory[key] = (torch.zeros_like(gradient), torch.zeros_like(gradient))
        mean, square = (state[: len(gradient)] for state in self.memory[key])
        mean.lerp_(gradient, 1 - MEAN_DECAY)
        square.mul_(SQUARE_DECAY).addcmul_(gradient, gradient, value=1 - SQUARE_DECAY)
        root = (square / (1 - SQUARE_DECAY**self.steps)).sqrt_().add_(EPSILON)
        return mean / (1 - MEAN_DECAY**self.steps) / root
