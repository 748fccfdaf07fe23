"""Partitions divide a dataset among clients as the papers say, and lose no sample."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from fairfleet.common.errors import UsageError
from fairfleet.lab.partitioning.partitions import Indices, Partition, partition
from fairfleet.lab.partitioning.splits import split, split_all, split_as_published

CIFAR_LIKE = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 5000))
POOLED_FASHION_LIKE = np.random.default_rng(1).permutation(np.repeat(np.arange(10), 7000))
SPECS = [
    "iid",
    "shards:2",
    "pat:2",
    "pat-fixed:2",
    "dirichlet:0.5,minimum=1",
    "dirichlet-capped:0.5,minimum=1",
    "quantity:1,minimum=1",
    "class",
]


def classes_of(labels: Indices, shares: list[Indices]) -> list[set[int]]:
    """Return the classes of each client."""
    return [set(labels[share].tolist()) for share in shares]


@pytest.mark.parametrize("spec", SPECS)
@settings(max_examples=20, deadline=None)
@given(clients=st.sampled_from([5, 10, 20]), seed=st.integers(0, 2**32), rest=st.integers(0, 37))
def test_every_sample_goes_to_exactly_one_client(
    spec: str, clients: int, seed: int, rest: int
) -> None:
    labels = np.random.default_rng(seed).permutation(np.arange(1000 + rest) % 10)
    shares = partition(spec, labels, None, clients, seed)
    assert len(shares) == clients
    assert np.array_equal(np.sort(np.concatenate(shares)), np.arange(len(labels)))


@pytest.mark.parametrize("spec", [*SPECS, "user"])
def test_a_partition_depends_on_the_seed_alone(spec: str) -> None:
    np.random.seed(0)
    labels, users = np.arange(2000) % 10, np.arange(2000) % 40
    first = partition(spec, labels, users, 10, seed=3)
    np.random.seed(1)
    again = partition(spec, labels, users, 10, seed=3)
    another_seed = partition(spec, labels, users, 10, seed=4)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    is_drawn = spec not in ("pat-fixed:2", "class")
    assert is_drawn != all(np.array_equal(a, b) for a, b in zip(first, another_seed, strict=True))


def test_fedfvs_cifar10_partition_is_two_shards_of_250_images_split_400_50_50() -> None:
    """Setup A: 200 shards of 250 images sorted by label, two for each client, split 80/10/10."""
    shares = partition("shards:2", CIFAR_LIKE, None, 100, seed=0)
    order = np.argsort(CIFAR_LIKE, kind="stable").reshape(200, 250)
    shard_of = {shard[0]: set(shard.tolist()) for shard in order}
    for share in shares:
        assert [set(half.tolist()) for half in np.split(share, 2)] == [
            shard_of[half[0]] for half in np.split(share, 2)
        ]
        assert 1 <= len(set(CIFAR_LIKE[share])) <= 2  # The 5,000 images of a class are 20 shards.
    assert {tuple(map(len, part)) for part in split_all(shares, (0.8, 0.1, 0.1), seed=12)} == {
        (400, 50, 50)
    }


def test_another_run_reshuffles_the_splits_of_the_same_partition() -> None:
    share = partition("shards:2", CIFAR_LIKE, None, 100, seed=0)[7]
    first, second = (split(share, (0.8, 0.1, 0.1), seed=seed) for seed in (12, 37))
    assert not np.array_equal(first.test, second.test)
    assert set(np.concatenate(first)) == set(np.concatenate(second)) == set(share)


def test_fedlfs_pat_2_is_five_groups_of_twenty_clients() -> None:
    """Setup E: not random; 70,000 images, 700 for each client, of which 600 train and 100 test."""
    shares = partition("pat-fixed:2", POOLED_FASHION_LIKE, None, 100, seed=5)
    expected = [{2 * group, 2 * group + 1} for group in range(5) for _ in range(20)]
    assert classes_of(POOLED_FASHION_LIKE, shares) == expected
    assert {tuple(map(len, part)) for part in split_all(shares, (6 / 7, 1 / 7))} == {(600, 100, 0)}


def test_fedlfs_pat_1_is_ten_groups_of_ten_clients() -> None:
    shares = partition("pat-fixed:1", POOLED_FASHION_LIKE, None, 100)
    assert classes_of(POOLED_FASHION_LIKE, shares) == [
        {group} for group in range(10) for _ in range(10)
    ]


@given(seed=st.integers(0, 2**32), each=st.integers(1, 4))
@settings(max_examples=20, deadline=None)
def test_random_pat_gives_every_client_k_classes_and_every_class_as_many_clients(
    seed: int, each: int
) -> None:
    labels = np.arange(3000) % 10
    held_classes = classes_of(labels, partition(f"pat:{each}", labels, None, 30, seed))
    assert {len(classes) for classes in held_classes} == {each}
    assert {sum(label in classes for classes in held_classes) for label in range(10)} == {3 * each}


def test_random_pat_does_not_make_fixed_groups() -> None:
    labels = np.arange(3000) % 10
    held_classes = classes_of(labels, partition("pat:2", labels, None, 50, seed=1))
    assert len(set(map(frozenset, held_classes))) > 10


def test_a_smaller_dirichlet_concentration_skews_more() -> None:
    def _skew(concentration: float) -> float:
        shares = partition(f"dirichlet:{concentration}", POOLED_FASHION_LIKE, None, 20, seed=2)
        counts = np.array(
            [np.bincount(POOLED_FASHION_LIKE[share], minlength=10) for share in shares]
        )
        return float((counts / counts.sum(1, keepdims=True)).max(1).mean())

    skews = [_skew(concentration) for concentration in (0.1, 1.0, 100.0)]
    assert all(more > less for more, less in pairwise(skews))
    assert skews[-1] < 0.15


@pytest.mark.parametrize("seed", range(3))
def test_both_dirichlets_give_every_client_the_minimum(seed: int) -> None:
    for spec in ("dirichlet:0.1", "dirichlet-capped:0.1"):
        sizes = [len(share) for share in partition(spec, POOLED_FASHION_LIKE, None, 100, seed)]
        assert min(sizes) >= 10


def test_fedlfs_dirichlet_stops_giving_once_a_client_has_an_even_share() -> None:
    """The class that brings a client to 700 samples (N / clients) is its last.

    The plain draw has no such bound.
    """

    def _before_the_last_class(spec: str) -> int:
        shares = partition(spec, POOLED_FASHION_LIKE, None, 100, seed=0)
        counts = [np.bincount(POOLED_FASHION_LIKE[share], minlength=10) for share in shares]
        return max(int(own[: np.flatnonzero(own)[-1]].sum()) for own in counts)

    assert (
        _before_the_last_class("dirichlet-capped:0.1")
        < 700
        < _before_the_last_class("dirichlet:0.1")
    )


def test_an_unreachable_minimum_is_explained() -> None:
    with pytest.raises(UsageError, match="larger concentration, fewer clients, or a lower minimum"):
        partition("dirichlet:0.1", np.arange(100) % 10, None, 20)


def test_natural_users_keep_their_own_samples() -> None:
    users = np.array([2, 0, 2, 5, 0, 2])
    shares = partition("user", np.zeros(6, np.int64), users)
    assert [share.tolist() for share in shares] == [[1, 4], [0, 2, 5], [3]]
    assert [
        share.tolist() for share in partition("user,minimum=2", np.zeros(6, np.int64), users)
    ] == [
        [1, 4],
        [0, 2, 5],
    ]


def test_users_are_drawn_if_there_are_more_users_than_clients() -> None:
    users = np.repeat(np.arange(50), 3)
    shares = partition("user", np.zeros(150, np.int64), users, clients=7, seed=1)
    assert len(shares) == len({int(users[share[0]]) for share in shares}) == 7


@pytest.mark.parametrize(
    ("users", "clients", "says"), [(None, 3, "no natural users"), ([0, 0, 1], 3, "2 have")]
)
def test_missing_natural_users_are_explained(
    users: list[int] | None, clients: int, says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        partition(
            "user", np.zeros(3, np.int64), None if users is None else np.array(users), clients
        )


@pytest.mark.parametrize(
    ("clients", "expected"),
    [
        (None, [{0}, {1}, {2}, {3}]),
        (2, [{0, 1}, {2, 3}]),
        (8, [{0}, {0}, {1}, {1}, {2}, {2}, {3}, {3}]),
    ],
)
def test_by_class_gives_each_client_classes_of_its_own(
    clients: int | None, expected: list[set[int]]
) -> None:
    labels = np.arange(40) % 4
    assert classes_of(labels, partition("class", labels, None, clients)) == expected


def test_a_partition_that_leaves_a_client_without_samples_is_refused() -> None:
    """Three classes of two samples each cannot be dealt to nine clients."""
    for spec in ("pat:1", "pat-fixed:1", "shards:1", "class", "dirichlet:1,minimum=0"):
        with pytest.raises(UsageError, match=r"without samples|number of clients"):
            partition(spec, np.array([0, 1, 2] * 2), None, 9)
    with pytest.raises(UsageError, match="without samples"):
        partition("pat:1", np.array([0] * 50 + [1]), None, 4)


def test_pat_that_does_not_fit_is_explained() -> None:
    labels = np.arange(100) % 10
    for kind in ("pat", "pat-fixed"):
        with pytest.raises(UsageError, match="there are only 10"):
            partition(f"{kind}:11", labels, None, 5)
        with pytest.raises(UsageError, match="of 10 classes; use 4 clients or more"):
            partition(f"{kind}:3", labels, None, 3)
        assert len(partition(f"{kind}:3", labels, None, 4)) == 4
    with pytest.raises(
        UsageError, match="leaves 2 of 12 clients without samples; use a multiple of 5 clients"
    ):
        partition("pat-fixed:2", labels, None, 12)


@pytest.mark.parametrize("each", ["26", "1e12", "1e300"])
def test_shards_without_samples_are_refused(each: str) -> None:
    with pytest.raises(
        UsageError, match=r"more shards than the 100 samples .* use at most shards:25"
    ):
        partition(f"shards:{each}", np.arange(100) % 10, None, 4)
    assert len(partition("shards:25", np.arange(100) % 10, None, 4)) == 4


def test_quantity_skew_changes_sizes_and_not_the_mix_of_labels() -> None:
    shares = partition("quantity:0.5", POOLED_FASHION_LIKE, None, 20, seed=1)
    sizes = np.array([len(share) for share in shares])
    assert sizes.max() > 5 * sizes.min() >= 50
    large = shares[int(sizes.argmax())]
    assert np.abs(np.bincount(POOLED_FASHION_LIKE[large]) / len(large) - 0.1).max() < 0.02


@pytest.mark.parametrize(
    "text",
    [
        *(
            "iid",
            "dirichlet:0.1",
            "pat:2",
            "pat-fixed:1",
            "shards:5",
            "user,minimum=50",
            "dirichlet:1,minimum=0",
        ),
        *("shards:1234567", "pat:1000001", "dirichlet:0.12345678", "quantity:1e-05"),
    ],
)
def test_a_parsed_partition_is_written_back_unchanged(text: str) -> None:
    spec = Partition.parse(text)
    assert str(spec) == text
    assert Partition.model_validate(spec.model_dump()) == spec


@pytest.mark.parametrize(
    "text", ["", "dirichlet", "dirichlet:0", "dirichlet:nan", "pat:1.5", "pat:0", "iid:3", "shards",
             "shards:inf", "shards:nan", "pat:inf", "pat-fixed:-inf", "random:1", "iid,minimum=3",
             "dirichlet:1,size=2", "dirichlet:x"]
)  # fmt: skip
def test_an_invalid_partition_is_refused_with_a_list_of_the_kinds(text: str) -> None:
    with pytest.raises(UsageError, match="There are iid, shards"):
        Partition.parse(text)


def test_a_partition_in_a_settings_file_is_checked_too() -> None:
    assert Partition.model_validate({"kind": "dirichlet", "parameter": 0.1}) == Partition.parse(
        "dirichlet:0.1"
    )
    with pytest.raises(ValidationError):
        Partition.model_validate({"kind": "dirichlet", "beta": 0.1})


@pytest.mark.parametrize("clients", [None, 0, 101])
def test_an_impossible_number_of_clients_is_refused(clients: int | None) -> None:
    with pytest.raises(UsageError, match="from 1 to 100"):
        partition("iid", np.zeros(100, np.int64), None, clients)


@given(
    total=st.integers(0, 200),
    test=st.floats(0, 0.5),
    validation=st.floats(0, 0.4),
    seed=st.integers(0, 99),
)
def test_a_split_loses_nothing_and_always_trains(
    total: int, test: float, validation: float, seed: int
) -> None:
    parts = split(np.arange(total) * 3, (1 - test - validation, test, validation), seed)
    assert sorted(np.concatenate(parts).tolist()) == [3 * n for n in range(total)]
    assert len(parts.train) >= min(total, 1)
    assert len(parts.test) >= (test > 0 and total >= 2)


@pytest.mark.parametrize(
    "shares",
    [(0.8, 0.1), (), (1.0,), (0.4, 0.3, 0.2, 0.1), (0.8, float("nan")), (float("nan"),) * 3,
     (float("inf"), 0.2), (1.2, -0.2), (0.5, 0.5, float("nan"))],
)  # fmt: skip
def test_shares_that_do_not_add_up_are_refused(shares: tuple[float, ...]) -> None:
    with pytest.raises(
        UsageError, match=r"found .*; give two or three, none below 0, that add up to 1"
    ):
        split(np.arange(10), shares)


def test_the_published_parts_stay_apart() -> None:
    [client] = split_as_published([np.array([5, 99, 100, 3])], train_size=100)
    assert (client.train.tolist(), client.test.tolist(), client.validation.tolist()) == (
        [5, 99, 3],
        [100],
        [],
    )
    with pytest.raises(UsageError, match="1 of 2 clients"):
        split_as_published([np.array([5]), np.array([100])], train_size=100)
