"""The engine's inner products are exact, independent of arrival, and need no copy of the rows."""

import subprocess
import sys
import tracemalloc
from collections.abc import Sequence
from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairfleet.server.gram import Gram, GramEngine, blocks
from fairfleet.server.gram.kernel import Kernel
from fairfleet.server.gram.matmul_kernel import MatmulKernel
from fairfleet.server.gram.numpy_kernel import NumpyKernel
from tests.support.samples.torch_kernels import torch_kernel

LAYERS = [3, 20_000, 1, 140_000]
SIZE = sum(LAYERS)


def matrix(m: int, d: int = SIZE, seed: int = 0, dtype: type = np.float32) -> np.ndarray:
    """Return m random rows with d columns."""
    return np.random.default_rng(seed).standard_normal((m, d)).astype(dtype)


def filled(
    rows: Sequence[np.ndarray],
    layers: list[int] = LAYERS,
    kernel: NumpyKernel | Kernel | None = None,
) -> GramEngine:
    """Return an engine with these rows, numbered from 0."""
    engine = GramEngine(layers, kernel)
    engine.extend(dict(enumerate(rows)))
    return engine


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_inner_products_are_those_of_float64_per_layer(dtype: type) -> None:
    rows = matrix(5, dtype=dtype)
    gram = filled(rows).gram(range(5))
    wide, edges = rows.astype(np.float64), np.cumsum([0, *LAYERS])
    for layer, (start, stop) in enumerate(pairwise(edges)):
        part = wide[:, start:stop]
        np.testing.assert_allclose(gram.layers[layer], part @ part.T, rtol=1e-12, atol=1e-11)
    np.testing.assert_allclose(gram.whole, wide @ wide.T, rtol=1e-12, atol=1e-10)


def test_arrival_order_and_batches_change_no_bit() -> None:
    rows = matrix(4)
    want = filled(rows).gram(range(4)).layers
    for order in permutations(range(4)):
        engine = GramEngine(LAYERS)
        for k in order[:2]:
            engine.add(k, rows[k])
        engine.extend({k: rows[k] for k in order[2:]})
        assert engine.gram(range(4)).layers.tobytes() == want.tobytes()


def test_more_rows_than_a_batch_give_the_same_bits_as_one_by_one() -> None:
    rows = matrix(40, 30_000)
    engine = GramEngine([30_000])
    for k in reversed(range(40)):
        engine.add(k, rows[k])
    assert (
        engine.gram(range(40)).whole.tobytes()
        == filled(rows, [30_000]).gram(range(40)).whole.tobytes()
    )


@pytest.mark.parametrize(("old", "new"), [(0, 40), (0, 24), (0, 25), (30, 1), (50, 40), (24, 150)])
def test_many_rows_at_once_have_the_inner_products_of_float64(old: int, new: int) -> None:
    rows = matrix(old + new, 20_001)
    engine = GramEngine([5_000, 15_001], MatmulKernel())
    engine.extend(dict(enumerate(rows[:old])))
    engine.extend({old + k: row for k, row in enumerate(rows[old:])})
    wide = rows.astype(np.float64)
    products = engine.gram(range(old + new)).layers
    np.testing.assert_allclose(
        products[0], wide[:, :5_000] @ wide[:, :5_000].T, rtol=1e-12, atol=1e-10
    )
    np.testing.assert_allclose(products.sum(axis=0), wide @ wide.T, rtol=1e-12, atol=1e-10)
    assert (products == products.transpose(0, 2, 1)).all()


def test_the_number_of_threads_changes_no_bit() -> None:
    script = (
        "import os; os.cpu_count = lambda: {n}\n"
        "import numpy as np; from fairfleet.server.gram.engine import GramEngine\n"
        "rows = np.random.default_rng(0).standard_normal((4, 500_000)).astype(np.float32)\n"
        "e = GramEngine([500_000]); e.extend(dict(enumerate(rows)))\n"
        "total = e.combine(range(4), np.ones(4)).sum(dtype=float)\n"
        "print(e.gram(range(4)).whole.tobytes().hex(), total.hex())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script.format(n=n)], check=True, capture_output=True
        ).stdout
        for n in (1, 2, 5)
    }
    assert len(outputs) == 1


def test_memory_layout_changes_no_product_and_only_last_bits_of_a_combination() -> None:
    rows, c = matrix(14), np.random.default_rng(1).uniform(0.1, 1.0, 14)
    together = filled(rows)
    scattered = [np.zeros(5), *rows.copy()[::-1]][:0:-1]
    apart, mixed = (
        [row.copy() for row in rows],
        [*rows[:5], *(row.copy() for row in rows[5:9]), *rows[9:]],
    )
    for layout in (
        np.asfortranarray(rows),
        scattered,
        apart,
        mixed,
        list(np.repeat(rows, 2, axis=0)[::2]),
    ):
        engine = filled(layout)
        assert engine.gram(range(14)).layers.tobytes() == together.gram(range(14)).layers.tobytes()
        np.testing.assert_allclose(
            engine.combine(range(14), c), together.combine(range(14), c), rtol=0, atol=2e-6
        )
        assert (
            engine.combine(range(14), c).tobytes() == filled(layout).combine(range(14), c).tobytes()
        )


@given(st.integers(0, 2**32 - 1), st.integers(1, 6))
@settings(max_examples=20)
def test_combination_is_the_weighted_sum(seed: int, m: int) -> None:
    rows, c = matrix(m, seed=seed), np.random.default_rng(seed).standard_normal(m)
    combined = filled(rows).combine(range(m), c)
    want = c @ rows.astype(np.float64)
    assert combined.dtype == np.float32
    assert np.linalg.norm(combined - want) <= 1e-6 * np.linalg.norm(want)


def test_combination_per_layer_uses_each_layers_coefficients() -> None:
    rows, c = matrix(3), np.random.default_rng(1).standard_normal((len(LAYERS), 3))
    combined = filled(rows).combine(range(3), c)
    edges = np.cumsum([0, *LAYERS])
    for layer, (start, stop) in enumerate(pairwise(edges)):
        np.testing.assert_allclose(
            combined[start:stop], c[layer] @ rows[:, start:stop], rtol=1e-4, atol=1e-5
        )


def test_combination_that_cancels_keeps_its_digits() -> None:
    rows = matrix(3)
    rows[1] = rows[0] * np.float32(1 + 2**-10) + np.float32(1e-4) * rows[2]
    c = np.array([1e6 * (1 + 2**-10), -1e6, 0.0])
    want = c @ rows.astype(np.float64)
    assert np.linalg.norm(filled(rows).combine(range(3), c) - want) <= 1e-7 * np.linalg.norm(want)


def test_the_output_array_is_filled_and_a_zero_combination_is_exactly_zero() -> None:
    rows, out = matrix(2), np.full(SIZE, np.nan, np.float32)
    assert filled(rows).combine(range(2), np.zeros(2), out) is out
    assert not out.any()


def test_column_rules_see_every_column_once() -> None:
    rows = matrix(5)
    medians = filled(rows).columns(range(5), lambda columns: np.median(columns, axis=0))
    np.testing.assert_array_equal(medians, np.median(rows, axis=0))


def test_adding_and_combining_allocate_no_second_set_of_rows() -> None:
    rows = matrix(20, 400_000)
    # The first call creates the threads and their workspaces.
    filled(rows[:, :40], [40]).combine(range(20), np.ones(20))
    tracemalloc.start()
    engine = filled(rows, [400_000])
    engine.combine(range(20), np.ones(20))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 0.3 * rows.nbytes


def test_the_numpy_kernel_does_not_copy_rows() -> None:
    row = matrix(1)[0]
    assert NumpyKernel().hold(row) is row


def test_products_of_adopted_rows_are_not_computed_again() -> None:
    rows, adopted = matrix(3), np.arange(len(LAYERS) * 4, dtype=float).reshape(len(LAYERS), 2, 2)
    engine = GramEngine(LAYERS)
    engine.adopt({0: rows[0], 1: rows[1]}, adopted)
    engine.add(2, rows[2])
    gram = engine.gram(range(3))
    np.testing.assert_array_equal(gram.layers[:, :2, :2], adopted)
    np.testing.assert_array_equal(gram.layers[:, 2], filled(rows).gram(range(3)).layers[:, 2])
    with pytest.raises(ValueError, match="adopt before adding"):
        engine.adopt({3: rows[0]}, adopted[:, :1, :1])


def test_wrong_rows_are_refused_with_what_was_expected() -> None:
    engine = filled(matrix(1))
    with pytest.raises(ValueError, match="one row per client"):
        engine.add(0, matrix(1)[0])
    with pytest.raises(ValueError, match=rf"shape \(7,\); expected floats of shape \({SIZE},\)"):
        engine.add(1, np.zeros(7, np.float32))
    with pytest.raises(ValueError, match="int64"):
        engine.add(1, np.zeros(SIZE, np.int64))


def test_merging_layers_is_addition() -> None:
    rows = matrix(3)
    split, merged = filled(rows).gram(range(3)), filled(rows, [SIZE]).gram(range(3))
    np.testing.assert_allclose(split.whole, merged.whole, rtol=1e-13, atol=1e-10)
    assert isinstance(split.of([2, 0]), Gram)
    np.testing.assert_array_equal(split.of([2, 0]).whole, split.whole[np.ix_([2, 0], [2, 0])])


def test_chunks_cover_every_column_once_and_never_cross_a_layer() -> None:
    cuts = list(blocks.chunks([5, blocks.CHUNK + 3, 0, 7]))
    assert [cut.start for cut in cuts[1:]] == [cut.stop for cut in cuts[:-1]]
    assert {cut.layer for cut in cuts} == {0, 1, 3}
    parts = list(blocks.pieces(cuts[1], blocks.SEGMENT))
    assert parts[0][0] == cuts[1].start
    assert parts[-1][1] == cuts[1].stop


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_torch_agrees_with_numpy_and_does_not_depend_on_order(dtype: type) -> None:
    rows, c = matrix(4, dtype=dtype), np.array([1.0, -0.5, 0.25, 2.0])
    torch, plain = filled(rows, kernel=torch_kernel()), filled(rows)
    np.testing.assert_allclose(
        torch.gram(range(4)).layers, plain.gram(range(4)).layers, rtol=1e-11, atol=1e-10
    )
    np.testing.assert_allclose(
        torch.combine(range(4), c), plain.combine(range(4), c), rtol=1e-4, atol=1e-6
    )
    middle = torch.columns(range(4), lambda columns: np.median(columns, axis=0))
    np.testing.assert_array_equal(middle, np.median(rows, axis=0).astype(dtype))
    backwards = GramEngine(LAYERS, torch_kernel())
    for k in (3, 1, 0, 2):
        backwards.add(k, rows[k])
    assert backwards.gram(range(4)).layers.tobytes() == torch.gram(range(4)).layers.tobytes()


def test_the_server_side_does_not_import_torch() -> None:
    script = (
        "import sys, fairfleet.server.aggregation, fairfleet.server.cli.rules; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
