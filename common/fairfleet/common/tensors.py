"""Models as three flat vectors (parameters, buffers, counters) and a signature of their tensors.

Server, wire and store use a model only in this form. Floats are float32 whatever the type in the
training framework, and counters are int64. Named arrays are views of the flat vectors, so naming
them costs no copy.
"""

from __future__ import annotations

import enum
import json
import math
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from fairfleet.common.errors import BadRequest, UsageError, short

Vector = NDArray[np.float32]
Counters = NDArray[np.int64]
Arrays = Mapping[str, NDArray[Any]]

FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
INTEGERS = frozenset({"bool", "uint8", "int8", "int16", "int32", "int64"})
# The names of batch-norm buffers in every framework that we know.
STATISTICS = ("running_mean", "running_var")


class Section(enum.IntEnum):
    """The part of a model that a tensor belongs to. The values are those of the wire."""

    PARAMETERS = 1
    BUFFERS = 2
    COUNTERS = 3


# The order of the sections in a file: the widest type comes first, so that all are aligned.
ON_DISK = (Section.COUNTERS, Section.PARAMETERS, Section.BUFFERS)


@dataclass(frozen=True)
class TensorSpec:
    """The name, shape, type in the training framework, section and layer of one tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    section: Section
    layer: str

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)} ({self.section.name.lower()})"


@dataclass(frozen=True)
class Signature:
    """The tensors of a model, in the order of the flat vectors.

    Raises BadRequest if two tensors have the same name, or a type does not fit its section.
    """

    tensors: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        names = [tensor.name for tensor in self.tensors]
        if len(set(names)) != len(names):
            raise BadRequest("a model's tensors must have distinct names; one name is there twice")
        for tensor in self.tensors:
            allowed = INTEGERS if tensor.section is Section.COUNTERS else FLOATS
            if tensor.dtype not in allowed:
                kind = tensor.section.name.lower()
                raise BadRequest(f"tensor {short(tensor)}: {kind} must be one of {sorted(allowed)}")

    def size(self, section: Section) -> int:
        """Return the number of elements in a section."""
        return self._sizes[section]

    @cached_property
    def _sizes(self) -> dict[Section, int]:
        return {
            section: sum(t.size for t in self.tensors if t.section is section)
            for section in Section
        }

    def spans(self, section: Section) -> Iterator[tuple[TensorSpec, slice]]:
        """Yield the tensors of a section, each with its place in the section's vector."""
        start = 0
        for tensor in self.tensors:
            if tensor.section is section:
                yield tensor, slice(start, start + tensor.size)
                start += tensor.size

    def difference(self, actual: Signature) -> str | None:
        """Describe the first way in which `actual` differs from this signature.

        Returns None if both have the same tensors. The order of the tensors does not matter.
        """
        expected_specs = {tensor.name: tensor for tensor in self.tensors}
        actual_specs = {tensor.name: tensor for tensor in actual.tensors}
        for name, expected in expected_specs.items():
            if name not in actual_specs:
                return f"tensor {expected} is missing"
            if not _is_same_tensor(actual_specs[name], expected):
                return f"found tensor {short(actual_specs[name])}, expected {expected}"
        extra = sorted(actual_specs.keys() - expected_specs.keys())
        return f"found unexpected tensor {short(actual_specs[extra[0]])}" if extra else None

    def to_json(self) -> str:
        """Return the signature as JSON text."""
        return json.dumps([asdict(tensor) for tensor in self.tensors])

    @classmethod
    def from_json(cls, text: str) -> Signature:
        """Return the signature that `to_json` wrote."""
        return cls(
            tuple(
                TensorSpec(
                    t["name"], tuple(t["shape"]), t["dtype"], Section(t["section"]), t["layer"]
                )
                for t in json.loads(text)
            )
        )


def _is_same_tensor(a: TensorSpec, b: TensorSpec) -> bool:
    return (a.shape, a.dtype, a.section) == (b.shape, b.dtype, b.section)


def layer_of(name: str) -> str:
    """Return the layer of a tensor: `encoder.0` for `encoder.0.weight` and `encoder.0.bias`."""
    return name.rpartition(".")[0] or name


@dataclass(frozen=True)
class Model:
    """A model: its signature, and one flat vector for each section."""

    signature: Signature
    parameters: Vector
    buffers: Vector
    counters: Counters

    @classmethod
    def empty(cls, signature: Signature) -> Model:
        """Return a model of this signature whose values are all zero."""
        return cls(
            signature,
            np.zeros(signature.size(Section.PARAMETERS), np.float32),
            np.zeros(signature.size(Section.BUFFERS), np.float32),
            np.zeros(signature.size(Section.COUNTERS), np.int64),
        )

    @classmethod
    def of(
        cls,
        parameters: Arrays,
        buffers: Arrays | None = None,
        dtypes: Mapping[str, str] | None = None,
    ) -> Model:
        """Return a model made of named arrays. Integer buffers become counters.

        `dtypes` gives the framework's own type of a tensor where numpy has none (bfloat16).
        """
        specs, buffers = [], buffers or {}
        for named, trained in ((parameters, True), (buffers, False)):
            for name, array in named.items():
                dtype = (dtypes or {}).get(name, str(array.dtype))
                section = Section.COUNTERS if dtype in INTEGERS else Section.BUFFERS
                if trained:
                    section = Section.PARAMETERS
                specs.append(TensorSpec(name, tuple(array.shape), dtype, section, layer_of(name)))
        model = cls.empty(Signature(tuple(specs)))
        model.assign({**parameters, **buffers})
        return model

    def vector(self, section: Section) -> NDArray[Any]:
        """Return the flat vector of a section."""
        match section:
            case Section.PARAMETERS:
                return self.parameters
            case Section.BUFFERS:
                return self.buffers
            case Section.COUNTERS:
                return self.counters

    def named(self) -> dict[str, NDArray[Any]]:
        """Return every tensor by name, as a view of the flat vectors."""
        return {
            tensor.name: self.vector(section)[span].reshape(tensor.shape)
            for section in Section
            for tensor, span in self.signature.spans(section)
        }

    def assign(self, arrays: Arrays) -> None:
        """Copy every tensor from named arrays.

        Raises BadRequest if the names or shapes are not those of the signature.
        """
        views = self.named()
        if views.keys() != arrays.keys():
            name = sorted(views.keys() ^ arrays.keys())[0]
            problem = "is missing" if name in views else "is not part of the model"
            raise BadRequest(f"tensor {short(name)} {problem}; the model has {len(views)} tensors")
        for name, view in views.items():
            if arrays[name].shape != view.shape:
                raise BadRequest(
                    f"tensor {name} has shape {arrays[name].shape}; the model expects {view.shape}"
                )
            np.copyto(view, arrays[name], casting="unsafe")

    def overwrite(self, source: Model) -> None:
        """Copy all values of another model of the same signature into this one."""
        for section in Section:
            self.vector(section)[:] = source.vector(section)

    def save(self, path: Path, **metadata: str) -> None:
        """Write a safetensors file.

        The library would first copy every tensor, here a complete model, so this method writes
        the format itself. It overwrites an existing file in place: a file that already has its
        blocks costs half as much.
        """
        fields = {"fairfleet": self.signature.to_json(), **metadata}
        text = json.dumps({"__metadata__": fields, **self._tensor_headers()}).encode()
        text += b" " * (-len(text) % 8)
        with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0) as file:
            write_all(file, struct.pack("<Q", len(text)) + text)
            for section in ON_DISK:
                write_all(file, self.vector(section).view(np.uint8).data)
            file.truncate()

    def _tensor_headers(self) -> dict[str, Any]:
        """Return the entry of every tensor in the header of a safetensors file."""
        headers: dict[str, Any] = {}
        start = 0
        for section in ON_DISK:
            dtype, width = ("I64", 8) if section is Section.COUNTERS else ("F32", 4)
            for tensor, _ in self.signature.spans(section):
                end = start + width * tensor.size
                headers[tensor.name] = {
                    "dtype": dtype,
                    "shape": tensor.shape,
                    "data_offsets": [start, end],
                }
                start = end
        return headers

    @classmethod
    def load(cls, path: Path) -> tuple[Model, dict[str, str]]:
        """Return the model and the metadata of a safetensors file.

        A file from another program is read as well: integers and batch-norm statistics become
        buffers or counters. Raises UsageError if the file is missing or damaged.
        """
        try:
            with safe_open(path, framework="numpy") as file:
                metadata = file.metadata() or {}
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise UsageError(f"cannot read {path} as a safetensors file: {error}") from error
        if "fairfleet" in metadata:
            model = cls.empty(Signature.from_json(metadata["fairfleet"]))
            model.assign(arrays)
            return model, metadata
        buffers = {
            name: array
            for name, array in arrays.items()
            if str(array.dtype) in INTEGERS or name.endswith(STATISTICS)
        }
        parameters = {name: array for name, array in arrays.items() if name not in buffers}
        return cls.of(parameters, buffers), metadata


def add_change(before: Model, change: Model, halvings: int, out: Model) -> None:
    """Write `before` plus 2^-halvings of a change to `out`, with the change's buffers and counters.

    `out` may be the change itself. Every machine computes the same bits: each value is an exact
    product and one rounded sum.
    """
    scaled = change.parameters
    if halvings:
        scaled = np.multiply(change.parameters, np.float32(2.0**-halvings), out=out.parameters)
    np.add(before.parameters, scaled, out=out.parameters)
    out.buffers[:] = change.buffers
    out.counters[:] = change.counters


def write_all(file: BinaryIO, data: bytes | memoryview) -> None:
    """Write all of the data to an unbuffered file.

    A single unbuffered write may write less than it is given, and above 2 GiB always does.
    """
    remaining = memoryview(data)
    while len(remaining):
        remaining = remaining[file.write(remaining) :]
