"""The cache of inner products returns what was stored and needs little memory."""

import tracemalloc

import numpy as np

from fairfleet.server.aggregation.history import History
from fairfleet.server.gram import Gram
from fairfleet.server.gram.pair_products import PairProducts


def products_of(seed: int, layers: int, clients: int) -> np.ndarray:
    """Return the inner products of random rows, of shape (layers, clients, clients)."""
    parts = np.random.default_rng(seed).standard_normal((layers, clients, 7))
    return parts @ parts.transpose(0, 2, 1)


def test_stored_products_are_returned_exactly_in_any_order_and_selection() -> None:
    names, products = [f"c{k}" for k in range(9)], products_of(0, 3, 9)
    pairs = PairProducts(3)
    shuffled = np.random.default_rng(1).permutation(9)
    pairs.store([names[k] for k in shuffled], products[:, shuffled][:, :, shuffled])
    for places in ([4, 0, 8], [8, 7, 6, 5], list(range(9)), []):
        np.testing.assert_array_equal(
            pairs.of([names[k] for k in places]), products[:, places][:, :, places]
        )


def test_products_of_a_forgotten_client_are_gone_when_its_slot_is_reused() -> None:
    pairs = PairProducts(2)
    pairs.store(["a", "b", "c"], products_of(0, 2, 3))
    pairs.forget("b")
    pairs.store(["d"], products_of(1, 2, 1))
    assert pairs.complete(["a", "b", "c", "d"]) == ["a", "c"]
    assert pairs.complete(["d", "a"]) == ["d"]


def test_the_history_caches_products_in_less_memory_than_their_full_array() -> None:
    history, clients, layers = History([1] * 20), [f"c{k}" for k in range(200)], 20
    products = products_of(2, layers, len(clients))
    tracemalloc.start()
    history.learn(clients, Gram(products))
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used < 0.75 * products.nbytes
