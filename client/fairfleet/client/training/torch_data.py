"""The samples of a torch task, in batches: tensors on the device, or any Dataset.

There is no DataLoader, because its worker processes would be forks of a process that runs gRPC's
threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from fairfleet.client.training.batches import Indices
from fairfleet.common.errors import UsageError

Data = Dataset[Any] | tuple[Tensor | NDArray[Any], Tensor | NDArray[Any]]
Collate = Callable[[list[Any]], Any]
Batch = tuple[Any, Tensor]


class SampleSource(Protocol):
    """A data set that can be read in batches."""

    def __len__(self) -> int: ...

    def batches(
        self, order: Iterator[Indices], device: torch.device, dtype: torch.dtype
    ) -> Iterator[Batch]:
        """Yield the samples of each entry of `order`, on `device`.

        Floats are converted to `dtype`, integer targets to int64.
        """


def make_sample_source(kind: str, data: Data, collate: Collate) -> SampleSource:
    """Return a source of batches for a user's data; `kind` names it in messages.

    Raises UsageError if the data have a form that cannot be used.
    """
    tensors = _tensors_of(data)
    if tensors is None:
        return _dataset_samples(kind, data, collate)
    if len(tensors) != 2 or len(tensors[0]) != len(tensors[1]):
        lengths = ", ".join(str(len(part)) for part in tensors)
        raise UsageError(
            f"the {kind} set must be a pair (x, y) of the same length; found lengths {lengths}"
        )
    return TensorSamples(*tensors)


def _dataset_samples(kind: str, data: Data, collate: Collate) -> DatasetSamples:
    by_index = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if not by_index or isinstance(data, IterableDataset):
        raise UsageError(
            f"the {kind} set is a {type(data).__name__}; it must be a pair (x, y) of tensors or "
            "arrays, or a Dataset with a length and access by index"
        )
    return DatasetSamples(kind, data, collate)


def _tensors_of(data: Any) -> tuple[Tensor, ...] | None:
    """Return the data's tensors, or None if the data are not made of tensors or arrays."""
    match data:
        case tuple() | list() if data and all(
            isinstance(part, (Tensor, np.ndarray)) for part in data
        ):
            return tuple(part if isinstance(part, Tensor) else _tensor(part) for part in data)
        case TensorDataset():
            return data.tensors
        case Subset():  # for example from random_split
            tensors = _tensors_of(data.dataset)
            return tensors and tuple(part[torch.as_tensor(data.indices)] for part in tensors)
    return None


def _tensor(array: NDArray[Any]) -> Tensor:
    # Memory is shared with the array unless it is not C-contiguous or read-only: torch supports
    # neither negative strides nor read-only memory.
    return torch.from_numpy(np.require(array, requirements=["C", "W"]))


class TensorSamples:
    """Samples in two tensors. They are moved to the device once; a batch is one indexing."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def batches(
        self, order: Iterator[Indices], device: torch.device, dtype: torch.dtype
    ) -> Iterator[Batch]:
        """Yield copies of the selected samples, because a model may work in place."""
        self.x, self.y = _place(self.x, device, dtype), _place_target(self.y, device, dtype)
        for indices in order:
            selected = torch.from_numpy(indices).to(device)
            yield self.x[selected], self.y[selected]


class DatasetSamples:
    """Samples of a Dataset, read by index and joined by `collate`."""

    def __init__(self, kind: str, data: Any, collate: Collate) -> None:
        self.kind, self.data, self.collate = kind, data, collate

    def __len__(self) -> int:
        return len(self.data)

    def batches(
        self, order: Iterator[Indices], device: torch.device, dtype: torch.dtype
    ) -> Iterator[Batch]:
        """Yield the selected samples, each batch read anew."""
        for indices in order:
            x, y = self._pair([self.data[int(index)] for index in indices])
            yield _place(x, device, dtype), _place_target(y, device, dtype)

    def _pair(self, samples: list[Any]) -> Any:
        batch = self.collate(samples)
        if not (
            isinstance(batch, (tuple, list)) and len(batch) == 2 and isinstance(batch[1], Tensor)
        ):
            raise UsageError(
                f"a sample of the {self.kind} set must be a pair (x, y), y a number or a tensor; "
                f"a batch of them became a {type(batch).__name__}. Wrap the Dataset, or give "
                "TorchTask a collate function."
            )
        return batch


def _place(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Move every tensor in an input made of tuples, lists and mappings."""
    match value:
        case Tensor():
            return value.to(device, dtype if value.is_floating_point() else value.dtype)
        case Mapping():
            return {key: _place(part, device, dtype) for key, part in value.items()}
        case tuple() | list():
            return [_place(part, device, dtype) for part in value]
    return value


def _place_target(target: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    if target.is_floating_point():
        return target.to(device, dtype)
    # torch's losses accept classes as int64 only; data sets often store them in fewer bytes.
    return target.to(device, torch.bool if target.dtype is torch.bool else torch.int64)
