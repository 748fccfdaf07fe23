"""Functions between torch modules and FairFleet's models, plans and gradients.

They hold no state. Tensors that leave a module are copies, so a later training cannot change them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fairfleet.common.errors import TaskFailed, UsageError
from fairfleet.common.tensors import Model
from fairfleet.common.training_plan import Plan


def choose_device(name: str) -> torch.device:
    """Return the torch device of this name, after one operation on it has succeeded.

    `auto` means cuda if there is one, else mps, else cpu. Raises UsageError if the device
    cannot be used.
    """
    name = _best_device() if name == "auto" else name
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:  # torch built without CUDA asserts
        reason = str(error).partition("\n")[0]
        raise UsageError(
            f"device {name!r} cannot be used here ({reason}); give auto, cpu, cuda or mps"
        ) from error
    return device


def _best_device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch inside the block, for dropout and the like.

    The caller's random state is restored afterwards.
    """
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def trainable(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that training changes."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def parameters_and_buffers(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the module's parameters and its saved buffers, by name.

    A tensor with several names is listed once. Buffers that are not saved are left out.
    """
    saved = module.state_dict().keys()
    buffers = {name: buffer for name, buffer in module.named_buffers() if name in saved}
    return dict(module.named_parameters()), buffers


def as_model(module: nn.Module) -> Model:
    """Return a copy of the module's tensors as a model, with their original types noted."""
    parameters, buffers = parameters_and_buffers(module)
    dtypes = {
        name: str(tensor.dtype).removeprefix("torch.")
        for name, tensor in (parameters | buffers).items()
    }
    return Model.of(copied_arrays(parameters), copied_arrays(buffers), dtypes)


def copied_arrays(tensors: dict[str, Tensor]) -> dict[str, NDArray[Any]]:
    """Return copies as numpy arrays: floats as float32, everything else as int64."""
    return {name: _array(tensor.detach()) for name, tensor in tensors.items()}


def _array(tensor: Tensor) -> NDArray[Any]:
    dtype = torch.float32 if tensor.is_floating_point() else torch.int64
    array: NDArray[Any] = tensor.to("cpu", dtype, copy=True).numpy()
    return array


def make_solver(plan: Plan, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the torch optimizer for the plan's solver."""
    rate, decay = plan.learning_rate, plan.weight_decay
    if plan.solver == "adam":
        return torch.optim.Adam(parameters, rate, weight_decay=decay)
    return torch.optim.SGD(
        parameters, rate, momentum=plan.momentum, nesterov=plan.nesterov, weight_decay=decay
    )


def forward(module: nn.Module, x: Any, y: Tensor) -> Any:
    """Return the output for a training batch, and explain batches of one that cannot work."""
    try:
        return module(x)
    except ValueError as error:
        if len(y) > 1:
            raise
        raise TaskFailed(
            f"the model cannot train on a batch of one sample ({error}). Batch normalisation "
            "needs two: give the plan a larger batch_size, or this client more data."
        ) from error


def add_proximal_gradient(parameters: list[nn.Parameter], anchor: list[Tensor], mu: float) -> None:
    """Add the gradient of mu/2 times the squared distance to the anchor (FedProx)."""
    for parameter, origin in zip(parameters, anchor, strict=True):
        # A parameter without a gradient is not used by the loss, so it has not moved.
        if parameter.grad is not None:
            parameter.grad.add_(parameter.detach() - origin, alpha=mu)


def gradient_norm(module: nn.Module) -> float:
    """Return the Euclidean norm of all gradients of the module, summed in float64."""
    gradients = [p.grad.double() for p in trainable(module) if p.grad is not None]
    return math.sqrt(sum(g.square().sum().item() for g in gradients))


def check_finite(loss: float, where: str) -> float:
    """Return the loss, or raise TaskFailed if it is not a finite number."""
    if not math.isfinite(loss):
        raise TaskFailed(
            f"the loss {where} is {loss}. Training diverged, or the data contain such values: "
            "try a smaller learning_rate in the plan, and look for NaN in this client's data."
        )
    return loss
