"""The samples of a torch task, in batches: tensors on the device, or any Dataset.

The order of the samples is always the plan's. A Dataset is read once per pass, in this thread or
by the worker processes of a DataLoader. Workers are started anew, not forked: a fork of a process
that runs gRPC's threads may hang.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from fairfleet.client.training.batches import Indices
from fairfleet.common.errors import UsageError

Samples = Dataset[Any] | DataLoader[Any] | tuple[Tensor | NDArray[Any], Tensor | NDArray[Any]]
# A function is called again for newer data.
Data = Samples | Callable[[], Samples]
Collate = Callable[[list[Any]], Any]
Batch = tuple[Any, Tensor]


class Reading(NamedTuple):
    """How the samples of a Dataset are read."""

    collate: Collate
    workers: int = 0  # processes; 0: the training thread itself
    pin_memory: bool = False  # copy batches to the device from page-locked memory


class SampleSource(Protocol):
    """A data set that can be read in batches."""

    def __len__(self) -> int: ...

    def batches(
        self, order: Iterator[Indices], device: torch.device, dtype: torch.dtype
    ) -> Iterator[Batch]:
        """Yield the samples of each entry of `order`, on `device`.

        Floats are converted to `dtype`, integer targets to int64.
        """


def is_function(data: Data | None) -> TypeGuard[Callable[[], Samples]]:
    """Return whether data are given as a function that loads them."""
    return callable(data) and not isinstance(data, Dataset)


def loaded(data: Data) -> Samples:
    """Return the data; a function is called for them."""
    return data() if callable(data) and not isinstance(data, Dataset) else data


def make_sample_source(kind: str, data: Samples, reading: Reading) -> SampleSource:
    """Return a source of batches for a user's data; `kind` names it in messages.

    Of a DataLoader, the Dataset and the way of reading it are used; the plan decides the batches.
    Raises UsageError if the data have a form that cannot be used.
    """
    if isinstance(data, DataLoader):
        reading = _reading_of(kind, data)
        data = data.dataset
    tensors = _tensors_of(data)
    if tensors is None:
        return _dataset_samples(kind, data, reading)
    if len(tensors) != 2 or len(tensors[0]) != len(tensors[1]):
        lengths = ", ".join(str(len(part)) for part in tensors)
        raise UsageError(
            f"the {kind} set must be a pair (x, y) of the same length; found lengths {lengths}"
        )
    return TensorSamples(*tensors)


def _reading_of(kind: str, loader: DataLoader[Any]) -> Reading:
    if loader.batch_size is None and loader.batch_sampler is None:
        raise UsageError(
            f"the {kind} set's DataLoader makes no batches (batch_size=None); give it a batch_size "
            "(the server's plan replaces it), or give TorchTask the Dataset itself"
        )
    return Reading(loader.collate_fn, loader.num_workers, loader.pin_memory)


def _dataset_samples(kind: str, data: Any, reading: Reading) -> SampleSource:
    by_index = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if not by_index or isinstance(data, IterableDataset):
        raise UsageError(
            f"the {kind} set is a {type(data).__name__}; it must be a pair (x, y) of tensors or "
            "arrays, or a Dataset with a length and access by index"
        )
    source = LoadedSamples if reading.workers or reading.pin_memory else DatasetSamples
    return source(kind, data, reading)


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

    def __init__(self, kind: str, data: Any, reading: Reading) -> None:
        self.kind, self.data, self.reading = kind, data, reading

    def __len__(self) -> int:
        return len(self.data)

    def batches(
        self, order: Iterator[Indices], device: torch.device, dtype: torch.dtype
    ) -> Iterator[Batch]:
        """Yield the selected samples, each batch read anew."""
        for x, y in map(self._pair, self._read(order)):
            yield _place(x, device, dtype), _place_target(y, device, dtype)

    def _read(self, order: Iterator[Indices]) -> Iterator[Any]:
        for indices in order:
            yield self.reading.collate([self.data[int(index)] for index in indices])

    def _pair(self, batch: Any) -> Any:
        if not (
            isinstance(batch, (tuple, list)) and len(batch) == 2 and isinstance(batch[1], Tensor)
        ):
            raise UsageError(
                f"a sample of the {self.kind} set must be a pair (x, y), y a number or a tensor; "
                f"a batch of them became a {type(batch).__name__}. Wrap the Dataset, or give "
                "TorchTask a collate function."
            )
        return batch


class LoadedSamples(DatasetSamples):
    """Samples of a Dataset that a DataLoader reads ahead, in the order that a pass needs.

    The workers of the training set stay between passes, because starting them takes seconds.
    """

    def __init__(self, kind: str, data: Any, reading: Reading) -> None:
        super().__init__(kind, data, reading)
        self._order: Iterator[Indices] = iter(())
        self._generator = torch.Generator()  # so that the training's own random numbers stay
        spawned = {"multiprocessing_context": "spawn"} if reading.workers else {}
        self._loader: DataLoader[Any] = DataLoader(
            PortableDataset(data) if reading.workers else data,
            batch_sampler=self,
            collate_fn=reading.collate,
            num_workers=reading.workers,
            pin_memory=reading.pin_memory and torch.accelerator.is_available(),
            persistent_workers=reading.workers > 0 and kind == "training",
            generator=self._generator,
            **spawned,  # type: ignore[arg-type]
        )

    def __iter__(self) -> Iterator[list[int]]:
        return (indices.tolist() for indices in self._order)

    def _read(self, order: Iterator[Indices]) -> Iterator[Any]:
        self._order = order
        self._generator.manual_seed(torch.initial_seed())  # of workers that augment samples
        yield from self._loader


class PortableDataset(Dataset[Any]):
    """A Dataset that a new process can load: it looks for modules where this one found them."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.data[index]

    def __reduce__(self) -> Any:
        return _unpacked, ([os.getcwd(), *sys.path], pickle.dumps(self.data))


def _unpacked(search_path: list[str], data: bytes) -> PortableDataset:
    """Return the Dataset in a worker process. The data come from the process that started it."""
    sys.path.extend(folder for folder in search_path if folder not in sys.path)
    return PortableDataset(pickle.loads(data))


def _place(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Move every tensor in an input made of tuples, lists and mappings."""
    match value:
        case Tensor():
            floating = value.is_floating_point()
            return value.to(device, dtype if floating else value.dtype, non_blocking=True)
        case Mapping():
            return {key: _place(part, device, dtype) for key, part in value.items()}
        case tuple() | list():
            return [_place(part, device, dtype) for part in value]
    return value


def _place_target(target: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    if target.is_floating_point():
        return target.to(device, dtype, non_blocking=True)
    # torch's losses accept classes as int64 only; data sets often store them in fewer bytes.
    kind = torch.bool if target.dtype is torch.bool else torch.int64
    return target.to(device, kind, non_blocking=True)
