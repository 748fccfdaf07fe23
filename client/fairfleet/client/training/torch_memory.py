"""The memory that a training step of a torch module needs.

It is measured on two small batches, by what autograd saves for the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

SMALL = (2, 4)  # samples; batch normalisation cannot train on one
STATE = 5  # times the parameters: themselves, gradient, anchor, and up to two solver moments


def largest_batch(module: nn.Module, loss_of: Callable[[int], Tensor], memory_bytes: int) -> int:
    """Return how many samples fit into this much memory; 0 if not even one does.

    `loss_of(n)` is the loss of the module on n samples. The memory grows by the same amount with
    every sample. Besides the saved tensors, the backward pass holds the gradients of the largest
    intermediate result and of its successor at the same time.
    """
    fixed = STATE * sum(parameter.nbytes for parameter in module.parameters())
    own = {
        tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *module.buffers())
    }
    few, more = (_needed_bytes(loss_of, samples, own) for samples in SMALL)
    per_sample = (more - few) / (SMALL[1] - SMALL[0])
    available = memory_bytes - fixed - (few - SMALL[0] * per_sample)
    return max(0, int(available // max(per_sample, 1.0)))


def _needed_bytes(loss_of: Callable[[int], Tensor], samples: int, own: set[int]) -> int:
    """Return the bytes of a forward and backward pass, without the module's own tensors."""
    saved: dict[int, int] = {}  # by address, because several results may share their memory

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = loss_of(samples)  # keeps alive everything that was saved for it
    needed = sum(saved.values()) + 2 * max(saved.values(), default=0)
    del loss
    return needed
