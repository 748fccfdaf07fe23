"""FedLF's layers are modules, tensors or one block, by the names of the model's tensors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given

from fairfleet.common.tensors import Model, Signature
from fairfleet.lab.experiments.experiment import Experiment
from fairfleet.server.aggregation.aggregator import aggregate
from fairfleet.server.aggregation.staging import layer_names, layer_sizes
from fairfleet.server.rules import recipe
from tests.support.samples.cohorts import fleet, seeds

SIZES = {"0.weight": 6, "0.bias": 2, "2.weight": 4, "2.bias": 2, "scale": 1, "body.norm.weight": 3}


def signature(sizes: dict[str, int]) -> Signature:
    """Return the signature of a model with these parameter tensors."""
    arrays = {name: np.zeros(size, np.float32) for name, size in sizes.items()}
    return Model.of(arrays).signature


def test_a_module_is_the_tensors_whose_names_agree_up_to_the_last_dot() -> None:
    model = signature(SIZES)
    assert layer_names(model, "tensors") == [tensor.name for tensor in model.tensors]
    named = dict(zip(layer_names(model, "modules"), layer_sizes(model, "modules"), strict=True))
    assert named == {"0": 8, "2": 6, "scale": 1, "body.norm.weight": 3}
    assert sum(layer_sizes(model, "modules")) == sum(layer_sizes(model, "tensors")) == 18


def test_a_model_of_one_layer_is_one_module() -> None:
    assert layer_sizes(signature({"weight": 6, "bias": 3}), "modules") == [9]
    assert layer_sizes(signature({"w1": 6, "w2": 3}), "modules") == [6, 3]


@pytest.mark.parametrize(
    ("layers", "blocks"), [("modules", "modules"), ("tensors", "tensors"), ("one", "modules")]
)
def test_the_rule_says_which_blocks_it_needs(layers: str, blocks: str) -> None:
    assert recipe("fedlf", layers=layers).rule.blocks() == blocks
    assert recipe("fedlf").rule.blocks() == "modules"
    assert recipe("fedavg").rule.blocks() == "tensors"


@given(seeds)
def test_one_block_is_the_step_of_a_model_without_layers(seed: int) -> None:
    rows, reports = fleet(seed, 4)
    one = aggregate(np.zeros(40), rows, reports, recipe("fedlf", layers="one"), layers=[15, 25])
    plain = aggregate(np.zeros(40), rows, reports, recipe("fedlf"), layers=[40])
    np.testing.assert_allclose(one.step, plain.step, rtol=1e-9, atol=1e-12)
    assert one.diagnostics.notes["groups"] == [[0, 2]]


@given(seeds)
def test_no_client_is_harmed_in_any_merged_block(seed: int) -> None:
    rows, reports = fleet(seed, 4)
    out = aggregate(np.zeros(40), rows, reports, recipe("fedlf"), layers=[8, 2, 30])
    assume(out.diagnostics.status in ("ok", "p_dropped"))
    edges = np.cumsum([0, 8, 2, 30])
    for first, last in out.diagnostics.notes["groups"]:
        part = slice(edges[first], edges[last])
        size = np.linalg.norm(out.step[part])
        for row in rows.values():
            assert row[part] @ out.step[part] >= -1e-9 * np.linalg.norm(row[part]) * size


def test_fedlf_with_tensors_has_the_records_from_before_modules() -> None:
    before = Experiment(rule="fedavg").key()
    modules, tensors = Experiment(rule="fedlf"), Experiment(rule="fedlf,layers=tensors")
    assert modules.earlier_keys() == {"layers are tensors": tensors.key()}
    assert tensors.earlier_keys() == {}
    assert (
        len({before, modules.key(), tensors.key(), Experiment(rule="fedlf,layers=one").key()}) == 4
    )
    p, q = "fedlf,use_p=false,layers=tensors", "fedlf,use_p=false"
    assert Experiment(rule=p).key() in Experiment(rule=q).earlier_keys().values()
