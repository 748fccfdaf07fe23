"""Memory for updates: one matrix in the order of the clients, used again and again, and never twice at a time."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fairfleet.common.tensors import Model
from fairfleet.server.intake import Rows

SIGNATURE = Model.of({"weight": np.zeros(3, np.float32)}, {"mean": np.zeros(2, np.float32)}).signature
CLIENTS = ["ann", "bob", "cid", "dan"]


def address(row: Model) -> int:
    place: int = row.parameters.__array_interface__["data"][0]
    return place


def test_the_rows_of_a_round_lie_evenly_in_the_order_of_their_clients() -> None:
    rows = Rows(SIGNATURE)
    rows.expect(CLIENTS)
    taken = {client: rows.take(client) for client in reversed(CLIENTS)}
    places = [address(taken[client]) for client in CLIENTS]
    assert np.diff(places).tolist() == 3 * [taken["ann"].parameters.nbytes]


def test_memory_that_was_given_back_is_used_again() -> None:
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
        st.integers(0, 9).map(lambda at: ("give back", at)),
    )
)


@given(actions)
def test_no_two_updates_ever_share_memory(actions: list[tuple[str, object]]) -> None:
    rows, held = Rows(SIGNATURE), list[Model]()
    for action, given_with in actions:
        match action, given_with:
            case "expect", set(clients):
                rows.expect(clients)
            case "take", str(client):
                row = rows.take(client)
                assert not any(np.shares_memory(row.parameters, other.parameters) for other in held)
                assert not any(np.shares_memory(row.buffers, other.buffers) for other in held)
                held.append(row)
            case "give back", int(at) if held:
                rows.give_back([held.pop(at % len(held))])
