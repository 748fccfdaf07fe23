"""Models as flat vectors: named views, exact files, and messages that name the wrong tensor."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fairfleet.common.errors import BadRequest, UsageError
from fairfleet.common.tensors import Model, Section, Signature, TensorSpec


def mixed() -> Model:
    return Model.of(
        {
            "net.0.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
            "net.0.bias": np.ones(2),
            "scale": np.float32(7),
        },
        {
            "norm.running_mean": np.full(4, 0.5, np.float16),
            "norm.count": np.array(9),
            "mask": np.array([True, False]),
        },
        {"norm.running_mean": "bfloat16"},
    )


def test_every_tensor_is_in_its_section_and_layer() -> None:
    signature = mixed().signature
    assert [(t.name, t.dtype, t.section.name, t.layer) for t in signature.tensors] == [
        ("net.0.weight", "float32", "PARAMETERS", "net.0"),
        ("net.0.bias", "float64", "PARAMETERS", "net.0"),
        ("scale", "float32", "PARAMETERS", "scale"),
        ("norm.running_mean", "bfloat16", "BUFFERS", "norm"),
        ("norm.count", "int64", "COUNTERS", "norm"),
        ("mask", "bool", "COUNTERS", "mask"),
    ]
    assert [signature.size(section) for section in Section] == [9, 4, 3]


def test_named_arrays_are_views() -> None:
    model = mixed()
    model.named()["net.0.weight"][1, 2] = 42
    assert model.parameters[5] == 42


def test_a_file_is_read_exactly_by_us_and_by_the_library(tmp_path: Path) -> None:
    model = mixed()
    model.save(tmp_path / "m.safetensors", version="3")
    back, metadata = Model.load(tmp_path / "m.safetensors")
    assert (back.signature, metadata["version"]) == (model.signature, "3")
    for name, array in load_file(tmp_path / "m.safetensors").items():
        np.testing.assert_array_equal(array, model.named()[name])
        np.testing.assert_array_equal(array, back.named()[name])


def test_a_safetensors_file_of_another_program_is_read(tmp_path: Path) -> None:
    arrays = {
        "fc.weight": np.ones((2, 2), np.float32),
        "bn.running_var": np.ones(2, np.float32),
        "steps": np.array(3),
    }
    save_file(arrays, tmp_path / "plain.safetensors")
    model, _ = Model.load(tmp_path / "plain.safetensors")
    sections = {tensor.name: tensor.section for tensor in model.signature.tensors}
    assert sections == {
        "fc.weight": Section.PARAMETERS,
        "bn.running_var": Section.BUFFERS,
        "steps": Section.COUNTERS,
    }


@pytest.mark.parametrize("content", [b"", b"nonsense" * 10, b"\xff" * 8 + b"{}"])
def test_a_damaged_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(UsageError, match="as a safetensors file"):
        Model.load(tmp_path / "x")


def test_the_message_names_an_array_that_does_not_fit() -> None:
    model = mixed()
    arrays = model.named()
    with pytest.raises(BadRequest, match="tensor mask is missing"):
        model.assign({name: array for name, array in arrays.items() if name != "mask"})
    with pytest.raises(BadRequest, match="tensor extra is not part of the model"):
        model.assign({**arrays, "extra": np.ones(1)})
    with pytest.raises(BadRequest, match=r"tensor scale has shape \(2,\)"):
        model.assign({**arrays, "scale": np.ones(2)})


def test_a_signature_refuses_duplicate_names_and_unknown_types() -> None:
    spec = TensorSpec("w", (1,), "float32", Section.PARAMETERS, "w")
    with pytest.raises(BadRequest, match="twice"):
        Signature((spec, spec))
    with pytest.raises(BadRequest, match="complex64"):
        Signature((TensorSpec("w", (1,), "complex64", Section.PARAMETERS, "w"),))
    assert Signature.from_json(mixed().signature.to_json()) == mixed().signature
