"""FedCKA: compare layers with those of the received model and of the last one, in training.

Son, Kim, Chung: Comparisons Where It Matters, 2022 (arXiv 2112.00407). Training adds to the loss
mu times the mean over some layers of -log(e^s / (e^s + e^t)). Here s is the similarity of the
layer's activations to those of the received model, and t that to those of the model that the client
trained last. Similarity is linear centered kernel alignment over the samples of a batch.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fairfleet.common.errors import UsageError

SMALLEST = 1e-12  # a shorter vector of centered products says nothing about similarity


def centered_products(activations: Tensor) -> Tensor:
    """Return the inner products of a batch's centered activations, as a vector of length one.

    Activations that are equal for all samples give zeros.
    """
    rows = activations.flatten(1)
    rows = rows - rows.mean(0)
    products = (rows @ rows.T).flatten()
    unit: Tensor = products / products.norm().clamp_min(SMALLEST)
    return unit


def alignment(first: Tensor, second: Tensor) -> Tensor:
    """Return the linear centered kernel alignment of two layers' activations, from 0 to 1.

    The first axis is that of the samples. The alignment does not change if the features are
    rotated, or multiplied by a number.
    """
    return centered_products(first) @ centered_products(second)


class LayerSimilarity:
    """The regularisation of FedCKA, for `TorchTask(…, similarity=LayerSimilarity())`.

    `layers` is how many layers are compared, from the input on; a layer is a module that has
    parameters of its own. The first training adds nothing, because there is no model that the
    client trained before. That model is in memory only, so this is also so after a restart.
    """

    def __init__(self, layers: int = 2, mu: float = 3.0) -> None:
        if layers < 1 or not 0 <= mu < float("inf"):
            raise UsageError(
                f"LayerSimilarity needs layers from 1 and a finite mu from 0; found {layers} "
                f"and {mu}"
            )
        self.layers, self.mu = layers, mu
        self._received: nn.Module | None = None
        self._previous: nn.Module | None = None

    def begin(self, module: nn.Module) -> None:
        """Remember the received model, with which `module` is filled."""
        self._received = _frozen(module) if self._previous is not None else None

    def penalty(self, module: nn.Module, x: Any) -> Tensor | None:
        """Return what is added to the loss of a batch; None in the first training."""
        if self._received is None or self._previous is None:
            return None
        own = self._activations(module, x)
        with torch.no_grad():
            others = [self._activations(model, x) for model in (self._received, self._previous)]
        terms = [
            functional.softplus(alignment(local, last) - alignment(local, received))
            for local, received, last in zip(own, *others, strict=True)
        ]
        return self.mu * torch.stack(terms).mean()

    def end(self, module: nn.Module) -> None:
        """Remember the trained model for the next training."""
        self._previous, self._received = _frozen(module), None

    def _activations(self, module: nn.Module, x: Any) -> list[Tensor]:
        """Return the outputs of the compared layers, in eval mode, with the input first."""
        found: list[Tensor] = []
        layers = [part for part in module.modules() if list(part.parameters(recurse=False))]
        handles = [
            layer.register_forward_hook(lambda _module, _inputs, out: found.append(_first(out)))
            for layer in layers[: self.layers]
        ]
        was_training = module.training
        try:
            module.eval()  # no dropout, and no change of batch statistics
            module(x)
        finally:
            module.train(was_training)
            for handle in handles:
                handle.remove()
        return found


def _first(output: Any) -> Tensor:
    """Return a layer's output; the first of several, such as the states of an LSTM."""
    first: Tensor = output[0] if isinstance(output, tuple) else output
    return first


def _frozen(module: nn.Module) -> nn.Module:
    """Return a copy that neither trains nor changes."""
    return copy.deepcopy(module).eval().requires_grad_(False)
