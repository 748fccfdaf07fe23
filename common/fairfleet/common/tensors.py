"""A model as three flat vectors (parameters, buffers, counters) and the signature that names their parts.

Server, wire and store know a model only in this form. Floats are float32 whatever the training
framework's type, counters int64; named arrays are views of the flat vectors, so that naming costs no copy.
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
STATISTICS = ("running_mean", "running_var")  # how every framework we know names batch-norm buffers


class Section(enum.IntEnum):
    PARAMETERS = 1
    BUFFERS = 2
    COUNTERS = 3


ON_DISK = (Section.COUNTERS, Section.PARAMETERS, Section.BUFFERS)  # the wider first, so that all are aligned


@dataclass(frozen=True)
class TensorSpec:
    name: str
    shape: tuple[int, ...]
    dtype: str
    section: Section
    layer: str

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)} ({self.section.name.lower()})"


@dataclass(frozen=True)
class Signature:
    """Which tensors a model has, in the order of the flat vectors."""

    tensors: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        names = [tensor.name for tensor in self.tensors]
        if len(set(names)) != len(names):
            raise BadRequest("a model's tensors must have distinct names; one name is there twice")
        for tensor in self.tensors:
            known = INTEGERS if tensor.section is Section.COUNTERS else FLOATS
            if tensor.dtype not in known:
                kind = tensor.section.name.lower()
                raise BadRequest(f"tensor {short(tensor)}: {kind} must be one of {sorted(known)}")

    def size(self, section: Section) -> int:
        return self._sizes[section]

    @cached_property
    def _sizes(self) -> dict[Section, int]:
        return {section: sum(t.size for t in self.tensors if t.section is section) for section in Section}

    def spans(self, section: Section) -> Iterator[tuple[TensorSpec, slice]]:
        at = 0
        for tensor in self.tensors:
            if tensor.section is section:
                yield tensor, slice(at, at + tensor.size)
                at += tensor.size

    def difference(self, other: Signature) -> str | None:
        """The first way in which `other` is not this model, in words; the order does not matter."""
        mine = {tensor.name: tensor for tensor in self.tensors}
        theirs = {tensor.name: tensor for tensor in other.tensors}
        for name, tensor in mine.items():
            if name not in theirs:
                return f"tensor {tensor} is missing"
            found = theirs[name]
            if (found.shape, found.dtype, found.section) != (tensor.shape, tensor.dtype, tensor.section):
                return f"found tensor {short(found)}, expected {tensor}"
        extra = sorted(theirs.keys() - mine.keys())
        return f"found unexpected tensor {short(theirs[extra[0]])}" if extra else None

    def to_json(self) -> str:
        return json.dumps([asdict(tensor) for tensor in self.tensors])

    @classmethod
    def from_json(cls, text: str) -> Signature:
        return cls(
            tuple(
                TensorSpec(t["name"], tuple(t["shape"]), t["dtype"], Section(t["section"]), t["layer"])
                for t in json.loads(text)
            )
        )


def layer_of(name: str) -> str:
    """`encoder.0.weight` and `encoder.0.bias` are of layer `encoder.0`."""
    return name.rpartition(".")[0] or name


@dataclass(frozen=True)
class Model:
    signature: Signature
    parameters: Vector
    buffers: Vector
    counters: Counters

    @classmethod
    def empty(cls, signature: Signature) -> Model:
        return cls(
            signature,
            np.zeros(signature.size(Section.PARAMETERS), np.float32),
            np.zeros(signature.size(Section.BUFFERS), np.float32),
            np.zeros(signature.size(Section.COUNTERS), np.int64),
        )

    @classmethod
    def of(cls, parameters: Arrays, buffers: Arrays | None = None, dtypes: Mapping[str, str] | None = None) -> Model:
        """A model from named arrays; integer buffers become counters.

        `dtypes` names the framework's own types where numpy has none (bfloat16).
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
        match section:
            case Section.PARAMETERS:
                return self.parameters
            case Section.BUFFERS:
                return self.buffers
            case Section.COUNTERS:
                return self.counters

    def named(self) -> dict[str, NDArray[Any]]:
        """Every tensor by name, as a view."""
        return {
            tensor.name: self.vector(section)[span].reshape(tensor.shape)
            for section in Section
            for tensor, span in self.signature.spans(section)
        }

    def assign(self, arrays: Arrays) -> None:
        """Copies every tensor in from named arrays; names and shapes must be those of the signature."""
        views = self.named()
        if views.keys() != arrays.keys():
            odd = sorted(views.keys() ^ arrays.keys())[0]
            found = "is missing" if odd in views else "is not part of the model"
            raise BadRequest(f"tensor {short(odd)} {found}; the model has {len(views)} tensors")
        for name, view in views.items():
            if arrays[name].shape != view.shape:
                raise BadRequest(f"tensor {name} has shape {arrays[name].shape}; the model expects {view.shape}")
            np.copyto(view, arrays[name], casting="unsafe")

    def overwrite(self, other: Model) -> None:
        """With another model of the same signature."""
        for section in Section:
            self.vector(section)[:] = other.vector(section)

    def save(self, path: Path, **metadata: str) -> None:
        """A safetensors file. Written by hand, because the library first copies every tensor: here, a whole model.

        Writes over what is there: a file that has its blocks already costs half as much.
        """
        header: dict[str, Any] = {"__metadata__": {"fairfleet": self.signature.to_json(), **metadata}}
        at = 0
        for section in ON_DISK:
            dtype, width = ("I64", 8) if section is Section.COUNTERS else ("F32", 4)
            for tensor, _ in self.signature.spans(section):
                offsets = [at, at + width * tensor.size]
                header[tensor.name] = {"dtype": dtype, "shape": tensor.shape, "data_offsets": offsets}
                at = offsets[1]
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0) as file:
            write_all(file, struct.pack("<Q", len(text)) + text)
            for section in ON_DISK:
                write_all(file, self.vector(section).view(np.uint8).data)
            file.truncate()

    @classmethod
    def load(cls, path: Path) -> tuple[Model, dict[str, str]]:
        """A model and the file's metadata; a plain safetensors file of any origin is understood as well."""
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
        buffers = {n: a for n, a in arrays.items() if str(a.dtype) in INTEGERS or n.endswith(STATISTICS)}
        return cls.of({n: a for n, a in arrays.items() if n not in buffers}, buffers), metadata


def add_change(before: Model, change: Model, halvings: int, out: Model) -> None:
    """`before` plus 2^-halvings of a change, with the change's buffers; `out` may be the change itself.

    The same bits wherever it is computed: an exact product and a rounded sum per value.
    """
    scaled = change.parameters
    if halvings:
        scaled = np.multiply(change.parameters, np.float32(2.0**-halvings), out=out.parameters)
    np.add(before.parameters, scaled, out=out.parameters)
    out.buffers[:] = change.buffers
    out.counters[:] = change.counters


def write_all(file: BinaryIO, data: bytes | memoryview) -> None:
    """An unbuffered write may take less than it is given, above 2 GiB always."""
    left = memoryview(data)
    while len(left):
        left = left[file.write(left) :]
