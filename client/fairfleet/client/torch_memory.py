"""How much memory a training step takes: measured on two small batches, by what autograd keeps for the way back."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

SMALL = (2, 4)  # samples; batch normalisation cannot train on one
STATE = 5  # times the parameters: themselves, gradient, anchor, and up to two moments of the solver


def largest_batch(module: nn.Module, loss_of: Callable[[int], Tensor], memory_bytes: int) -> int:
    """So many samples fit; 0 if not even one. `loss_of` is the loss of the module on so many samples.

    The memory grows by the same amount with every sample; beside what is kept, the gradients of the largest
    intermediate result and of its successor are there at once on the way back.
    """
    fixed = STATE * sum(parameter.nbytes for parameter in module.parameters())
    own = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *module.buffers())}
    few, more = (_needed(loss_of, samples, own) for samples in SMALL)
    each = (more - few) / (SMALL[1] - SMALL[0])
    return max(0, int((memory_bytes - fixed - (few - SMALL[0] * each)) // max(each, 1.0)))


def _needed(loss_of: Callable[[int], Tensor], samples: int, own: set[int]) -> int:
    kept: dict[int, int] = {}  # by address: several results may share their memory

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = loss_of(samples)  # as long as it lives, so does all that was kept
    needed = sum(kept.values()) + 2 * max(kept.values(), default=0)
    del loss
    return needed
