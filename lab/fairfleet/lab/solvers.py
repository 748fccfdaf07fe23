"""A plan's local solver on the stacked weights of many clients, step for step those of torch.optim.

Each client of a stack has the state (momentum, moments) of its own. Who has fewer steps stands further back in
the stack, so that those still training are always the first ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from fairfleet.common.plan import Plan
from fairfleet.lab.perceptron import LayerGradient, Stack

MEAN_DECAY, SQUARE_DECAY, EPSILON = 0.9, 0.999, 1e-8  # torch's defaults for Adam


class Solver(Protocol):
    def step(self, gradients: Iterable[LayerGradient]) -> None:
        """One step of the clients that these gradients are of: the first of the stack."""


def solver_for(plan: Plan, stack: Stack) -> Solver:
    plain = plan.solver == "sgd" and not (plan.momentum or plan.weight_decay or plan.proximal_mu)
    return PlainSgd(plan.learning_rate, stack) if plain else GeneralSolver(plan, stack)


class PlainSgd:
    """The gradient is never there as a tensor: product and step are one call."""

    def __init__(self, rate: float, stack: Stack) -> None:
        self.rate, self.stack = rate, stack

    def step(self, gradients: Iterable[LayerGradient]) -> None:
        for gradient in gradients:
            error, at = gradient.error, gradient.layer
            weight, bias = self.stack.weights[at][: len(error)], self.stack.biases[at][: len(error)]
            weight.baddbmm_(error.transpose(1, 2), gradient.input, alpha=-self.rate)
            if self.stack.network.layers[at].bias:
                bias.sub_(gradient.bias(), alpha=self.rate)


class GeneralSolver:
    """SGD with momentum, Nesterov or not, or Adam; weight decay, and the pull to the received model."""

    def __init__(self, plan: Plan, stack: Stack) -> None:
        self.plan, self.stack = plan, stack
        self.received = {id(p): p[:1].clone() for p in (*stack.weights, *stack.biases)} if plan.proximal_mu else {}
        self.memory: dict[int, tuple[Tensor, Tensor]] = {}
        self.steps = 0

    def step(self, gradients: Iterable[LayerGradient]) -> None:
        self.steps += 1
        for gradient in gradients:
            self._move(self.stack.weights[gradient.layer], gradient.weight())
            if self.stack.network.layers[gradient.layer].bias:
                self._move(self.stack.biases[gradient.layer], gradient.bias())

    def _move(self, whole: Tensor, gradient: Tensor) -> None:
        here = whole[: len(gradient)]
        if self.plan.proximal_mu:
            gradient.add_(here - self.received[id(whole)], alpha=self.plan.proximal_mu)
        if self.plan.weight_decay:
            gradient.add_(here, alpha=self.plan.weight_decay)
        here.sub_(self._direction(id(whole), gradient), alpha=self.plan.learning_rate)

    def _direction(self, of: int, gradient: Tensor) -> Tensor:
        if self.plan.solver == "adam":
            return self._adam(of, gradient)
        if not self.plan.momentum:
            return gradient
        if of not in self.memory:
            self.memory[of] = (gradient.clone(), gradient)
            velocity = self.memory[of][0]
        else:
            velocity = self.memory[of][0][: len(gradient)].mul_(self.plan.momentum).add_(gradient)
        return gradient.add(velocity, alpha=self.plan.momentum) if self.plan.nesterov else velocity

    def _adam(self, of: int, gradient: Tensor) -> Tensor:
        if of not in self.memory:
            self.memory[of] = (torch.zeros_like(gradient), torch.zeros_like(gradient))
        mean, square = (state[: len(gradient)] for state in self.memory[of])
        mean.lerp_(gradient, 1 - MEAN_DECAY)
        square.mul_(SQUARE_DECAY).addcmul_(gradient, gradient, value=1 - SQUARE_DECAY)
        root = (square / (1 - SQUARE_DECAY**self.steps)).sqrt_().add_(EPSILON)
        return mean / (1 - MEAN_DECAY**self.steps) / root
