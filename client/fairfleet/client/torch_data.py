"""A torch task's samples, by batch: tensors that lie on the device, or any Dataset, sample by sample.

No DataLoader: its worker processes would be forks of a process that holds gRPC's threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from fairfleet.client.batches import Indices
from fairfleet.common.errors import UsageError

Data = Dataset[Any] | tuple[Tensor | NDArray[Any], Tensor | NDArray[Any]]
Collate = Callable[[list[Any]], Any]
Batch = tuple[Any, Tensor]


class Samples(Protocol):
    def __len__(self) -> int: ...

    def batches(self, order: Iterator[Indices], device: torch.device, dtype: torch.dtype) -> Iterator[Batch]:
        """The samples of each entry of `order`, on `device`, floats as `dtype`, integer targets as int64."""


def samples_of(kind: str, data: Data, collate: Collate) -> Samples:
    pair = _tensors_of(data)
    if pair is None:
        by_index = hasattr(data, "__getitem__") and hasattr(data, "__len__")
        if not by_index or isinstance(data, IterableDataset):
            raise UsageError(
                f"the {kind} set is a {type(data).__name__}; it must be a pair (x, y) of tensors or arrays, "
                "or a Dataset with a length whose samples can be taken by index"
            )
        return DatasetSamples(kind, data, collate)
    if len(pair) != 2 or len(pair[0]) != len(pair[1]):
        found = ", ".join(str(len(part)) for part in pair)
        raise UsageError(f"the {kind} set must be a pair (x, y) of the same length; found lengths {found}")
    return TensorSamples(*pair)


def _tensors_of(data: Any) -> tuple[Tensor, ...] | None:
    """The data's tensors, where it is made of tensors or arrays as a whole."""
    match data:
        case tuple() | list() if data and all(isinstance(part, (Tensor, np.ndarray)) for part in data):
            return tuple(part if isinstance(part, Tensor) else _tensor(part) for part in data)
        case TensorDataset():
            return data.tensors
        case Subset():  # as random_split makes them
            whole = _tensors_of(data.dataset)
            return whole and tuple(part[torch.as_tensor(data.indices)] for part in whole)
    return None


def _tensor(array: NDArray[Any]) -> Tensor:
    # shared with the array, unless it is turned or read-only, which torch does not know
    return torch.from_numpy(np.require(array, requirements=["C", "W"]))


class TensorSamples:
    """Moved to the device as a whole, once; a batch is one indexing."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def batches(self, order: Iterator[Indices], device: torch.device, dtype: torch.dtype) -> Iterator[Batch]:
        self.x, self.y = _place(self.x, device, dtype), _place_target(self.y, device, dtype)
        for indices in order:
            chosen = torch.from_numpy(indices).to(device)
            yield self.x[chosen], self.y[chosen]  # copies, also of a full batch: a model may work in place


class DatasetSamples:
    def __init__(self, kind: str, data: Any, collate: Collate) -> None:
        self.kind, self.data, self.collate = kind, data, collate

    def __len__(self) -> int:
        return len(self.data)

    def batches(self, order: Iterator[Indices], device: torch.device, dtype: torch.dtype) -> Iterator[Batch]:
        for indices in order:
            x, y = self._pair([self.data[int(index)] for index in indices])
            yield _place(x, device, dtype), _place_target(y, device, dtype)

    def _pair(self, samples: list[Any]) -> Any:
        batch = self.collate(samples)
        if not (isinstance(batch, (tuple, list)) and len(batch) == 2 and isinstance(batch[1], Tensor)):
            raise UsageError(
                f"a sample of the {self.kind} set must be a pair (x, y), y a number or a tensor; "
                f"a batch of them came out as {type(batch).__name__}. Wrap the Dataset, or give TorchTask a collate."
            )
        return batch


def _place(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Moves tensors wherever they are in an input made of tuples, lists and mappings."""
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
    # torch's losses take classes as int64 only; data sets often hold them in fewer bytes
    return target.to(device, torch.bool if target.dtype is torch.bool else torch.int64)
