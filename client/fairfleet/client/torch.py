"""The usual task: a torch module, a training set, a test set and a loss.

Module and data are built once, moved to the device once, and kept. The losses and the gradient norm of a
report are measured in eval mode over all training data (no dropout, batch normalisation by its running
statistics), so they do not depend on the batches; only the solver's steps run in train mode.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import default_collate

from fairfleet.client.batches import Indices, batches, in_order
from fairfleet.client.task import Job, Trained
from fairfleet.client.torch_data import Batch, Collate, Data, Samples, samples_of
from fairfleet.client.torch_memory import largest_batch
from fairfleet.common.errors import TaskFailed, UsageError
from fairfleet.common.plan import Plan
from fairfleet.common.reports import Evaluation, TrainReport
from fairfleet.common.tensors import Arrays, Model, Signature

MEASURE_BATCH = 512  # samples per forward pass where nothing is trained; has no say in the result

Loss = Callable[[Any, Tensor], Tensor]
Accuracy = Callable[[Any, Tensor], "Tensor | float | None"]


def class_accuracy(output: Any, target: Tensor) -> Tensor | None:
    """The share of samples whose highest logit is the target's; None where this is not classification."""
    classifies = (
        isinstance(output, Tensor)
        and output.ndim == target.ndim + 1
        and output.shape[1] > 1
        and not (target.is_floating_point() or target.dtype is torch.bool)
    )
    return (output.argmax(1) == target).double().mean() if classifies else None


class TorchTask:
    """Trains `model()` on a client's own data.

    `train` and `test` are each a pair (x, y) of tensors or arrays, or a Dataset of such pairs; floats are given
    to the model in its own type. `loss(output, y)` is the mean over a batch, as torch's losses are.
    `accuracy(output, y)` is the share of right answers in a batch, or None. `collate` joins a Dataset's samples.
    """

    def __init__(
        self,
        model: Callable[[], nn.Module],
        *,
        train: Data,
        test: Data | None = None,
        loss: Loss,
        accuracy: Accuracy = class_accuracy,
        device: str = "auto",
        collate: Collate = default_collate,
    ) -> None:
        if isinstance(model, nn.Module) or not callable(model):
            raise UsageError(f"TorchTask needs a function that builds the model; found a {type(model).__name__}")
        self._build, self._loss, self._accuracy = model, loss, accuracy
        self._measure_batch = MEASURE_BATCH
        self._overwritten = False  # whether the module we keep has held a received model
        self._train = samples_of("training", train, collate)
        self._test = samples_of("test", test, collate) if test is not None else None
        self.train_samples = len(self._train)
        self.test_samples = len(self._test) if self._test is not None else 0
        if not self.train_samples:
            raise UsageError("the training set is empty; a client needs at least one sample to take part")
        self._device = choose_device(device)
        self.device = str(self._device)

    def use_device(self, name: str) -> None:
        """For whoever starts the client: cpu, cuda, cuda:1 or mps; auto leaves it as the task's author chose.

        Nothing is moved before it is used.
        """
        if name != "auto":
            self._device = choose_device(name)
            self.device = str(self._device)

    def fit_into(self, memory_bytes: int) -> int:
        """The largest batch with which one step stays within the memory; passes that only measure keep to it, too."""
        module = copy.deepcopy(self._module).to(self._device).train()  # of which batches leave their mark

        def loss_of(samples: int) -> Tensor:
            x, y = next(self._batches(module, self._train, iter([np.arange(samples) % self.train_samples])))
            return self._loss_of(module(x), y)

        with _seeded(0, self._device):
            batch = largest_batch(module, loss_of, memory_bytes)
        self._measure_batch = max(1, min(MEASURE_BATCH, batch))
        return batch

    def initial_model(self) -> Model:
        return _as_model(self._new_module() if self._overwritten else self._module)

    def train(self, model: Arrays, job: Job) -> Trained:
        started = time.perf_counter()
        module = self._received(model)
        with _seeded(job.plan.seed, self._device):
            before = self._measure(module, want_gradient=job.want_gradient_norm)
            steps = self._descend(module, job)
            after = self._measure(module)
        report = TrainReport(
            samples=self.train_samples,
            loss_before=before.loss,
            loss_after=after.loss,
            steps=steps,
            learning_rate=job.plan.learning_rate,
            gradient_norm=before.gradient_norm,
            accuracy=before.accuracy,
            seconds=time.perf_counter() - started,
        )
        parameters, buffers = _parameters_and_buffers(module)
        return Trained(_arrays(parameters | buffers), report)

    def evaluate(self, model: Arrays) -> Evaluation:
        if not self._test:
            raise UsageError("this task has no test samples to evaluate on; give some as TorchTask(…, test=…)")
        measured = self._measure(self._received(model), self._test)
        return Evaluation(samples=self.test_samples, loss=measured.loss, accuracy=measured.accuracy)

    def training_loss(self, model: Arrays) -> float:
        return self._measure(self._received(model)).loss

    @cached_property
    def _module(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):  # those who draw after us draw as if we had not
            return self._new_module()

    @cached_property
    def _signature(self) -> Signature:
        return _as_model(self._module).signature

    def _new_module(self) -> nn.Module:
        module = self._build()
        if not isinstance(module, nn.Module):
            raise UsageError(f"the model function must return a torch.nn.Module; it returned {type(module).__name__}")
        if not _trainable(module):
            raise UsageError("the model has no trainable parameter, so there is nothing to train")
        return module

    def _received(self, model: Arrays) -> nn.Module:
        staged = Model.empty(self._signature)
        staged.assign(model)  # checks names and shapes, and makes arrays that torch may write to
        self._overwritten = True
        module, arrays = self._module.to(self._device), staged.named()
        parameters, buffers = _parameters_and_buffers(module)
        with torch.no_grad():
            for name, tensor in (parameters | buffers).items():
                tensor.copy_(torch.from_numpy(arrays[name]))
        return module

    def _descend(self, module: nn.Module, job: Job) -> int:
        plan, parameters = job.plan, _trainable(module)
        origin = self._anchor(module, job)
        solver = _solver(plan, parameters)
        planned = plan.steps_for(self.train_samples)
        module.train()
        for done, (x, y) in enumerate(self._batches(module, self._train, batches(plan, self.train_samples)), start=1):
            solver.zero_grad()
            loss = self._loss_of(_forward(module, x, y), y)
            loss.backward()  # type: ignore[no-untyped-call]
            if plan.proximal_mu:
                _pull_back(parameters, origin, plan.proximal_mu)
            solver.step()
            job.progress(done, planned, _finite(loss.item(), f"at step {done} of {planned}"))
            if job.enough():
                return done
        return planned

    def _anchor(self, module: nn.Module, job: Job) -> list[Tensor]:
        """Where the proximal term pulls to, one tensor per trainable parameter."""
        named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
        if job.anchor is None:
            return [parameter.detach().clone() for _, parameter in named]
        return [torch.from_numpy(job.anchor[name].copy()).to(parameter) for name, parameter in named]

    def _measure(self, module: nn.Module, samples: Samples | None = None, *, want_gradient: bool = False) -> Measured:
        """Over all training data, or others: the loss, the accuracy if it is known, and the norm of the gradient."""
        loss, shares = 0.0, list[float | None]()
        module.zero_grad()
        with torch.set_grad_enabled(want_gradient):
            for part in self._parts(module, samples or self._train):
                loss += part.weight * part.loss.item()
                share = self._accuracy(part.output, part.target)
                shares.append(None if share is None else part.weight * float(share))
                if want_gradient:
                    (part.weight * part.loss).backward()  # type: ignore[no-untyped-call]
        known = [share for share in shares if share is not None]
        return Measured(
            _finite(loss, "over the training data" if samples is None else "over the test data"),
            min(sum(known), 1.0) if len(known) == len(shares) else None,  # weights add up to 1 but for rounding
            _gradient_norm(module) if want_gradient else None,
        )

    def _parts(self, module: nn.Module, samples: Samples) -> Iterator[Part]:
        """Every sample once, in eval mode."""
        module.eval()
        for x, y in self._batches(module, samples, in_order(len(samples), self._measure_batch)):
            output = module(x)
            yield Part(len(y) / len(samples), output, y, self._loss_of(output, y))

    def _batches(self, module: nn.Module, samples: Samples, order: Iterator[Indices]) -> Iterator[Batch]:
        return samples.batches(order, self._device, _trainable(module)[0].dtype)

    def _loss_of(self, output: Any, target: Tensor) -> Tensor:
        loss = self._loss(output, target)
        if loss.ndim:
            raise UsageError(
                f"the loss function returned a tensor of shape {list(loss.shape)}; it must return one number, "
                "the mean over the batch (in torch: reduction='mean')"
            )
        return loss


class Part(NamedTuple):
    weight: float  # the batch's share of all samples
    output: Any
    target: Tensor
    loss: Tensor


class Measured(NamedTuple):
    loss: float
    accuracy: float | None
    gradient_norm: float | None


def choose_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:  # torch built without CUDA asserts
        reason = str(error).partition("\n")[0]
        raise UsageError(f"device {name!r} cannot be used here ({reason}); give auto, cpu, cuda or mps") from error
    return device


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Dropout and the like draw from the plan's seed; the caller's random state is as before afterwards."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def _trainable(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def _parameters_and_buffers(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A tensor that the module has under several names is here once; buffers that are not saved are not here."""
    saved = module.state_dict().keys()
    return dict(module.named_parameters()), {name: b for name, b in module.named_buffers() if name in saved}


def _as_model(module: nn.Module) -> Model:
    parameters, buffers = _parameters_and_buffers(module)
    dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in (parameters | buffers).items()}
    return Model.of(_arrays(parameters), _arrays(buffers), dtypes)


def _arrays(tensors: dict[str, Tensor]) -> dict[str, NDArray[Any]]:
    """Copies, which the next training does not change."""
    return {name: _array(tensor.detach()) for name, tensor in tensors.items()}


def _array(tensor: Tensor) -> NDArray[Any]:
    dtype = torch.float32 if tensor.is_floating_point() else torch.int64
    array: NDArray[Any] = tensor.to("cpu", dtype, copy=True).numpy()
    return array


def _solver(plan: Plan, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    rate, decay = plan.learning_rate, plan.weight_decay
    if plan.solver == "adam":
        return torch.optim.Adam(parameters, rate, weight_decay=decay)
    return torch.optim.SGD(parameters, rate, momentum=plan.momentum, nesterov=plan.nesterov, weight_decay=decay)


def _forward(module: nn.Module, x: Any, y: Tensor) -> Any:
    try:
        return module(x)
    except ValueError as error:
        if len(y) > 1:
            raise
        raise TaskFailed(
            f"the model cannot train on a batch of one sample ({error}). Batch normalisation needs two: "
            "give the plan a larger batch_size, or this client more data."
        ) from error


def _pull_back(parameters: list[nn.Parameter], anchor: list[Tensor], mu: float) -> None:
    """FedProx: adds the gradient of mu/2 times the squared distance to the anchor."""
    for parameter, origin in zip(parameters, anchor, strict=True):
        if parameter.grad is not None:  # else the loss does not use it, and it has not moved
            parameter.grad.add_(parameter.detach() - origin, alpha=mu)


def _gradient_norm(module: nn.Module) -> float:
    gradients = [p.grad.double() for p in _trainable(module) if p.grad is not None]
    return math.sqrt(sum(g.square().sum().item() for g in gradients))


def _finite(loss: float, where: str) -> float:
    if not math.isfinite(loss):
        raise TaskFailed(
            f"the loss {where} is {loss}. Training diverged, or the data hold such values: "
            "try a smaller learning_rate in the plan, and look for NaN in this client's data."
        )
    return loss
