"""Loss, accuracy and gradient norm of a torch module, without waiting for each batch.

Reading a number from a GPU waits until all work before it is done. So losses stay on the device
until the end of a pass, and progress reports read one of them at intervals.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fairfleet.client.training.losses import ModelMeasures, Watch, mean_loss
from fairfleet.client.training.torch_data import Batch
from fairfleet.client.training.torch_modules import check_finite, gradient_norm
from fairfleet.common.reports import Measure
from fairfleet.common.training_plan import LossMeasurement

READ_SECONDS = 0.25  # between readings of a loss from the device

Loss = Callable[[Any, Tensor], Tensor]
Accuracy = Callable[[Any, Tensor], "Tensor | float | None"]
NamedMeasures = Callable[[Tensor, Tensor], Mapping[str, Measure]]


class TestOutputs:
    """Passes batches on to the task's accuracy, and keeps them for measures of the whole."""

    def __init__(self, accuracy: Accuracy, measures: NamedMeasures | None) -> None:
        self._accuracy, self._measures = accuracy, measures
        self._outputs, self._targets = list[Tensor](), list[Tensor]()

    def __call__(self, output: Any, target: Tensor) -> Tensor | float | None:
        """Return the accuracy of a batch."""
        if self._measures is not None:
            self._outputs.append(output.detach().cpu())
            self._targets.append(target.detach().cpu())
        return self._accuracy(output, target)

    def measures(self) -> dict[str, Measure]:
        """Return the task's own measures over all batches."""
        if self._measures is None:
            return {}
        return dict(self._measures(torch.cat(self._outputs), torch.cat(self._targets)))


class DeviceLoss:
    """The newest known loss of a training or a pass, read from the device at intervals."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._next, self._value = now, now(), 0.0

    def read(self, loss: Tensor, where: str, *, certainly: bool = False) -> float:
        """Return the loss if it is time to read it, else the one that was read last.

        The first one is read. Raises TaskFailed if the loss is not finite.
        """
        if certainly or self._now() >= self._next:
            self._value = check_finite(loss.item(), where)
            self._next = self._now() + READ_SECONDS
        return self._value


def measure(
    module: nn.Module,
    batches: Iterable[Batch],
    available: int,
    loss_of: Loss,
    accuracy_of: Accuracy,
    measurement: LossMeasurement = "exact",
    *,
    want_gradient: bool = False,
    where: str = "over the training data",
    watch: Watch | None = None,
) -> ModelMeasures:
    """Measure a module in eval mode over batches of `available` samples.

    `watch` may stop the pass between two batches. The gradient is that of the mean over all
    samples. Raises TaskFailed if a loss is not finite.
    """
    losses, shares, sizes = list[Tensor](), list["Tensor | float | None"](), list[int]()
    newest = DeviceLoss()
    module.eval()
    module.zero_grad()
    with torch.set_grad_enabled(want_gradient):
        for x, y in batches:
            if losses and watch and watch.stops(newest.read(losses[-1], where)):
                break
            output = module(x)
            loss = loss_of(output, y)
            losses.append(loss.detach())
            shares.append(accuracy_of(output, y))
            sizes.append(len(y))
            if want_gradient:
                (len(y) / available * loss).backward()  # type: ignore[no-untyped-call]
    values = torch.stack(losses).tolist()
    loss_mean = mean_loss(measurement, values, sizes, available)
    check_finite(loss_mean.loss, where)
    norm = gradient_norm(module) if want_gradient else None
    return ModelMeasures(loss_mean, _mean_share(shares, sizes), norm, sum(sizes))


def _mean_share(shares: list[Tensor | float | None], sizes: list[int]) -> float | None:
    """Return the mean accuracy of the batches, or None if one has none."""
    numbers = [float(share) for share in shares if share is not None]
    if len(numbers) < len(shares):
        return None
    measured = sum(sizes)
    weighted = (size / measured * share for size, share in zip(sizes, numbers, strict=True))
    return min(sum(weighted), 1.0)  # the weights add up to 1 except for rounding
