"""The usual task: a torch module, a training set, a test set and a loss.

The module and the data are built once, moved to the device once, and stay there. The losses and
the gradient norm of a report are measured in eval mode over all training data (no dropout, batch
normalisation by its running statistics), so they do not depend on the batches. Only the solver's
steps run in train mode.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from fairfleet.client.task import Job, Trained
from fairfleet.client.training.batches import Indices, batches, sequential_batches
from fairfleet.client.training.layer_similarity import LayerSimilarity
from fairfleet.client.training.losses import (
    FirstPassLoss,
    ModelMeasures,
    Watch,
    check_complete,
    measuring_order,
)
from fairfleet.client.training.torch_data import (
    Batch,
    Collate,
    Data,
    Reading,
    Samples,
    SampleSource,
    is_function,
    loaded,
    make_sample_source,
)
from fairfleet.client.training.torch_measures import (
    Accuracy,
    DeviceLoss,
    Loss,
    NamedMeasures,
    TestOutputs,
    measure,
)
from fairfleet.client.training.torch_memory import largest_batch
from fairfleet.client.training.torch_modules import (
    add_proximal_gradient,
    as_model,
    check_finite,
    choose_device,
    copied_arrays,
    forward,
    make_solver,
    parameters_and_buffers,
    seeded,
    trainable,
)
from fairfleet.common.errors import UsageError
from fairfleet.common.reports import Evaluation, TrainReport
from fairfleet.common.tensors import Arrays, Model, Signature
from fairfleet.common.training_plan import LossMeasurement, Plan

MEASURE_BATCH = 512  # samples per forward pass that only measures; does not change the result


def class_accuracy(output: Any, target: Tensor) -> Tensor | None:
    """Return the share of samples whose highest logit is the target's class.

    Return None if output and target do not look like classification.
    """
    classifies = (
        isinstance(output, Tensor)
        and output.ndim == target.ndim + 1
        and output.shape[1] > 1
        and not (target.is_floating_point() or target.dtype is torch.bool)
    )
    return (output.argmax(1) == target).double().mean() if classifies else None


class TorchTask:
    """A task that trains a torch module on this machine's own data.

    Args:
        model: a function that builds the module, for example the module's class. It is called
            on first use.
        train: the training samples: a pair (x, y) of tensors or arrays of the same length, or a
            Dataset of such pairs with a length and access by index, or a DataLoader, whose
            workers read the Dataset; the batches are the plan's. Floats are converted to the
            type of the module's parameters, integer targets to int64. A function that returns
            one of these is called again before each training: so data may arrive later.
        test: the test samples, in the same forms. Without them, the client does not evaluate.
        loss: `loss(output, y)`, one number: the mean over a batch, as torch's losses return.
        accuracy: `accuracy(output, y)`, the share of right answers in a batch, or None if there
            is no such share. The default handles class logits.
        measures: `measures(outputs, targets)`, further figures of a model, by name: a function of
            the outputs and targets of all test samples, on the CPU. It returns, for example,
            `{"auc": higher(0.93)}`, with `higher` and `lower` of `fairfleet.client`.
        device: auto, cpu, cuda, cuda:1 or mps. `fairfleet client --device` overrides it.
        collate: joins the samples of a Dataset to a batch (x, y).
        workers: processes that read a Dataset; 0 reads it in the training thread.
        pin_memory: copy batches to a GPU from page-locked memory.
        similarity: FedCKA's regularisation of the first layers; None: none.

    Raises UsageError if the model or the data cannot be used.

    Example:

        task = TorchTask(Net, train=(x, y), test=(x_test, y_test), loss=nn.CrossEntropyLoss())
    """

    def __init__(
        self,
        model: Callable[[], nn.Module],
        *,
        train: Data,
        test: Data | None = None,
        loss: Loss,
        accuracy: Accuracy = class_accuracy,
        measures: NamedMeasures | None = None,
        device: str = "auto",
        collate: Collate = default_collate,
        workers: int = 0,
        pin_memory: bool = False,
        similarity: LayerSimilarity | None = None,
    ) -> None:
        if isinstance(model, nn.Module) or not callable(model):
            raise UsageError(
                f"TorchTask needs a function that builds the model; found a {type(model).__name__}"
            )
        self._build, self._loss, self._accuracy = model, loss, accuracy
        self._measures, self._similarity = measures, similarity
        self._measure_batch = MEASURE_BATCH
        self._overwritten = False  # whether our module has been filled with a received model
        self._data, self._reading = (train, test), Reading(collate, workers, pin_memory)
        self._loaded: tuple[Samples, Samples | None] | None = None
        self._read_data()
        self._device = choose_device(device)
        self.device = str(self._device)

    def _read_data(self) -> None:
        """Load the data. A function that returns the same object again has no newer data.

        An object that grew or shrank is read anew.
        """
        train = loaded(self._data[0])
        test = None if self._data[1] is None else loaded(self._data[1])
        if self._loaded is not None and self._loaded[0] is train and self._loaded[1] is test:
            sizes = len(self._train), 0 if self._test is None else len(self._test)
            if sizes == (self.train_samples, self.test_samples):
                return
        own = make_sample_source("training", train, self._reading)
        other = None if test is None else make_sample_source("test", test, self._reading)
        if not len(own) and not is_function(self._data[0]):
            raise UsageError(
                "the training set is empty; a client needs at least one sample to take part. If "
                "data arrive later, give a function that loads them, as TorchTask(…, train=load)"
            )
        self._train: SampleSource = own
        self._test: SampleSource | None = other
        self._loaded = train, test
        self.train_samples: int = len(own)
        self.test_samples: int = 0 if other is None else len(other)

    def refresh(self) -> None:
        """Call the functions that load the data again, if there are any."""
        if any(map(is_function, self._data)):
            self._read_data()

    def use_device(self, name: str) -> None:
        """Select the device for training: cpu, cuda, cuda:1 or mps.

        `fairfleet client --device` calls this. `auto` keeps the choice of the task's author.
        Nothing is moved before its next use.
        """
        if name != "auto":
            self._device = choose_device(name)
            self.device = str(self._device)

    def fit_into(self, memory_bytes: int) -> int:
        """Return the largest batch for which one step fits into this much memory.

        Later passes that only measure respect this size as well.
        """
        module = copy.deepcopy(self._module)  # a copy, because a batch changes batch norm
        module = module.to(self._device).train()

        def loss_of(samples: int) -> Tensor:
            indices = np.arange(samples) % self.train_samples
            x, y = next(self._batches(module, self._train, iter([indices])))
            return self._loss_of(module(x), y)

        with seeded(0, self._device):
            batch = largest_batch(module, loss_of, memory_bytes)
        self._measure_batch = max(1, min(MEASURE_BATCH, batch))
        return batch

    def initial_model(self) -> Model:
        """Return the model as the model function builds it."""
        return as_model(self._new_module() if self._overwritten else self._module)

    def train(self, model: Arrays, job: Job) -> Trained:
        """Train the received model as the plan says, and measure what the job wants to know.

        Raises TaskFailed if a loss is not finite.
        """
        started, planned = time.perf_counter(), job.plan.steps_for(self.train_samples)
        module = self._load(model)
        first_pass = FirstPassLoss(job.plan, self.train_samples)
        with seeded(job.plan.seed, self._device):
            before = self._before(module, job)
            steps = self._descend(module, job, first_pass)
            after = self._after(module, job, Watch(job, steps, planned))
        loss = before.loss if before else first_pass.measured()
        check_finite(loss.loss, "over the first pass")
        report = TrainReport(
            **loss.report_fields(),
            samples=self.train_samples,
            loss_after=after,
            steps=steps,
            learning_rate=job.plan.learning_rate,
            gradient_norm=before.gradient_norm if before else None,
            accuracy=before.accuracy if before else None,
            seconds=time.perf_counter() - started,
        )
        parameters, buffers = parameters_and_buffers(module)
        return Trained(copied_arrays(parameters | buffers), report)

    def evaluate(self, model: Arrays) -> Evaluation:
        """Return loss, accuracy and the task's own measures on the test samples.

        Raises UsageError without any.
        """
        if not self._test:
            raise UsageError(
                "this task has no test samples to evaluate on; give some as TorchTask(…, test=…)"
            )
        module = self._load(model)
        order = sequential_batches(self.test_samples, self._measure_batch)
        outputs = TestOutputs(self._accuracy, self._measures)
        measures = measure(
            module,
            self._batches(module, self._test, order),
            self.test_samples,
            self._loss_of,
            outputs,
            where="over the test data",
        )
        return Evaluation(
            samples=self.test_samples,
            loss=measures.loss.loss,
            accuracy=measures.accuracy,
            measures=outputs.measures(),
        )

    def training_loss(self, model: Arrays) -> float:
        """Return the loss over all training samples, measured in eval mode."""
        return self._measure(self._load(model), Job(Plan()), "exact").loss.loss

    @cached_property
    def _module(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):  # the caller's random state stays as it was
            return self._new_module()

    @cached_property
    def _signature(self) -> Signature:
        return as_model(self._module).signature

    def _new_module(self) -> nn.Module:
        module = self._build()
        if not isinstance(module, nn.Module):
            raise UsageError(
                "the model function must return a torch.nn.Module; it returned "
                f"{type(module).__name__}"
            )
        if not trainable(module):
            raise UsageError("the model has no trainable parameter, so there is nothing to train")
        return module

    def _load(self, model: Arrays) -> nn.Module:
        """Return our module, on the device, filled with the received tensors."""
        staged = Model.empty(self._signature)
        staged.assign(model)  # checks names and shapes, and makes arrays that torch may write to
        self._overwritten = True
        module, arrays = self._module.to(self._device), staged.named()
        parameters, buffers = parameters_and_buffers(module)
        with torch.no_grad():
            for name, tensor in (parameters | buffers).items():
                tensor.copy_(torch.from_numpy(arrays[name]))
        return module

    def _descend(self, module: nn.Module, job: Job, first_pass: FirstPassLoss) -> int:
        """Train the module in place and return the number of steps taken."""
        plan, parameters = job.plan, trainable(module)
        anchor = _anchor_tensors(module, job) if plan.proximal_mu else []
        solver, newest = make_solver(plan, parameters), DeviceLoss()
        planned = plan.steps_for(self.train_samples)
        order = batches(plan, self.train_samples)
        # A personal model is not what FedCKA compares with.
        similarity = self._similarity if job.anchor is None else None
        if similarity:
            similarity.begin(module)
        module.train()
        for done, (x, y) in enumerate(self._batches(module, self._train, order), start=1):
            solver.zero_grad()
            loss = self._loss_of(forward(module, x, y), y)
            penalty = similarity.penalty(module, x) if similarity else None
            total = loss if penalty is None else loss + penalty
            total.backward()  # type: ignore[no-untyped-call]
            if plan.proximal_mu:
                add_proximal_gradient(parameters, anchor, plan.proximal_mu)
            solver.step()
            loss, where = loss.detach(), f"at step {done} of {planned}"
            first_pass.add(loss, len(y))
            job.progress(done, planned, newest.read(loss, where, certainly=done == planned))
            if job.enough():
                newest.read(loss, where, certainly=True)
                planned = done
                break
        if similarity:
            similarity.end(module)
        return planned

    def _before(self, module: nn.Module, job: Job) -> ModelMeasures | None:
        """Measure the received model; None if its loss is that of the first pass's batches."""
        measurement = job.measurement_before(self.train_samples)
        if measurement == "batches":
            return None
        watch = Watch(job, 0, job.plan.steps_for(self.train_samples))
        measures = self._measure(module, job, measurement, watch, job.want_gradient_norm)
        check_complete(measures, self.train_samples)
        return measures

    def _after(self, module: nn.Module, job: Job, watch: Watch) -> float | None:
        """Return the loss of the trained model, if it is wanted and there is time for it."""
        measurement = job.measurement_after(self.train_samples)
        if measurement == "none":
            return None
        measures = self._measure(module, job, measurement, watch)
        is_complete = measurement == "sampled" or measures.samples == self.train_samples
        return measures.loss.loss if is_complete else None

    def _measure(
        self,
        module: nn.Module,
        job: Job,
        measurement: LossMeasurement,
        watch: Watch | None = None,
        want_gradient: bool = False,
    ) -> ModelMeasures:
        """Measure loss, accuracy and gradient norm over the training samples."""
        order = measuring_order(job, measurement, self.train_samples, self._measure_batch)
        return measure(
            module,
            self._batches(module, self._train, order),
            self.train_samples,
            self._loss_of,
            self._accuracy,
            measurement,
            want_gradient=want_gradient,
            watch=watch,
        )

    def _batches(
        self, module: nn.Module, samples: SampleSource, order: Iterable[Indices]
    ) -> Iterator[Batch]:
        return samples.batches(iter(order), self._device, trainable(module)[0].dtype)

    def _loss_of(self, output: Any, target: Tensor) -> Tensor:
        loss = self._loss(output, target)
        if loss.ndim:
            raise UsageError(
                f"the loss function returned a tensor of shape {list(loss.shape)}; it must return "
                "one number, the mean over the batch (in torch: reduction='mean')"
            )
        return loss


def _anchor_tensors(module: nn.Module, job: Job) -> list[Tensor]:
    """Return what the proximal term pulls towards, one tensor per trainable parameter."""
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    if job.anchor is None:
        return [parameter.detach().clone() for _, parameter in named]
    return [torch.from_numpy(job.anchor[name].copy()).to(parameter) for name, parameter in named]
