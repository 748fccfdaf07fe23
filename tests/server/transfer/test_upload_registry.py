"""Memory for updates: one matrix in the order of the clients, reused but never shared."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fairfleet.common.tensors import Model
from fairfleet.server.transfer.upload_registry import Rows

SIGNATURE = Model.of(
    {"weight": np.zeros(3, np.float32)}, {"mean": np.zeros(2, np.float32)}
).signature
CLIENTS = ["ann", "bob", "cid", "dan"]


def address(row: Model) -> int:
    """Return where a row begins in memory."""
    start: int = row.parameters.__array_interface__["data"][0]
    return start


def test_the_rows_of_a_round_are_evenly_spaced_in_the_order_of_their_clients() -> None:
    rows = Rows(SIGNATURE)
    rows.expect(CLIENTS)
    by_client = {client: rows.take(client) for client in reversed(CLIENTS)}
    addresses = [address(by_client[client]) for client in CLIENTS]
    assert np.diff(addresses).tolist() == 3 * [by_client["ann"].parameters.nbytes]


def test_memory_that_was_given_back_is_reused() -> None:
    rows = Rows(SIGNATURE)
    rows.expect(CLIENTS)
    first = rows.take("bob")
    rows.give_back([first])
    rows.expect(["bob", "zoe"])
    assert rows.take("zoe") is first


actions = st.lists(
    st.one_of(
        st.sets(st.sampled_from(CLIENTS), min_size=1).map(lambda some: ("expect", some)),
        st.sampled_from([*CLIENTS, "stranger"]).map(lambda client: ("take", client)),
        st.integers(0, 9).map(lambda index: ("give back", index)),
    )
)


@given(actions)
def test_no_two_updates_ever_share_memory(actions: list[tuple[str, object]]) -> None:
    rows, in_use = Rows(SIGNATURE), list[Model]()
    for action, given_with in actions:
        match action, given_with:
            case "expect", set(clients):
                rows.expect(clients)
            case "take", str(client):
                row = rows.take(client)
                assert not any(np.shares_memory(row.parameters, used.parameters) for used in in_use)
                assert not any(np.shares_memory(row.buffers, used.buffers) for used in in_use)
                in_use.append(row)
            case "give back", int(index) if in_use:
                rows.give_back([in_use.pop(index % len(in_use))])
