"""Which step is taken, by what clients say of their losses; and that what is taken is what they tried."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairfleet.client.task import Measuring
from fairfleet.client.trying import trial_losses
from fairfleet.common.codecs import codec_named, is_exact, round_to, steady_codec
from fairfleet.common.errors import BadRequest
from fairfleet.common.stream import Decoder, digest_of
from fairfleet.common.tensors import Arrays, Model, Vector, add_change
from fairfleet.server.committing import Committer, Proposal
from fairfleet.server.descent_records import trial_write, trials_of
from fairfleet.server.downlink import Downlink
from fairfleet.server.publication import Publication
from fairfleet.server.rules import recipe
from fairfleet.server.rules.base import Found, Trials
from fairfleet.server.rules.fedmdfg import Line
from fairfleet.server.sessions import Member, Sessions
from fairfleet.server.store import Store
from fairfleet.server.verification import Terms, Verdict, decide
from fairfleet.server.verifying import Verifying
from tests.server.test_committing import initial, updates_of

BEFORE = {"a": 1.0, "b": 1.0, "c": 1.0, "d": 1.0}
BEFORE_LINE = {"a": 1.0, "b": 1.0, "c": 1.0}
TERMS = Terms(halvings=2, threshold=0.75, quorum=0.5, fallback="skip")
TRIALS = Trials(2)

losses = st.floats(0.0, 2.0) | st.just(math.inf)
answers = st.dictionaries(st.sampled_from("abcd"), st.tuples(losses, losses, losses))


def test_the_longest_step_that_enough_losses_speak_for_is_taken() -> None:
    found = decide(TRIALS, TERMS, BEFORE, {"a": (2, 0.5, 0.9), "b": (2, 0.5, 0.9), "c": (0, 0.5, 0.9), "d": (2, 2, 2)})
    assert (found.outcome, found.halvings, found.improved) == ("accepted", 1, (0.25, 0.75, 0.75))


def test_a_loss_that_stays_the_same_or_is_infinite_has_not_fallen() -> None:
    found = decide(TRIALS, TERMS, {"a": 1.0}, {"a": (math.inf, 1.0, 0.5)})
    assert (found.halvings, found.improved) == (2, (0.0, 0.0, 1.0))


@given(answers, st.sampled_from((0.25, 0.5, 0.75, 1.0)), st.sampled_from(("commit", "smallest", "skip")))
def test_a_step_is_accepted_if_and_only_if_the_share_reaches_the_threshold(
    found: dict[str, tuple[float, ...]], threshold: float, fallback: str
) -> None:
    terms = Terms(halvings=2, threshold=threshold, quorum=0.5, fallback=fallback)  # type: ignore[arg-type]
    verdict = decide(TRIALS, terms, BEFORE, found)
    found = {client: tried for client, tried in found.items() if min(tried) < math.inf}
    shares = [np.mean([tried[k] < 1.0 for tried in found.values()]) for k in range(3)] if len(found) >= 2 else []
    enough = [k for k, share in enumerate(shares) if share >= threshold]
    if enough:
        assert (verdict.outcome, verdict.halvings) == ("accepted", enough[0])
    else:
        assert verdict.outcome == fallback
        assert verdict.halvings == {"commit": 0, "smallest": 2, "skip": None}[fallback]


def test_too_few_answers_are_no_verification() -> None:
    found = decide(TRIALS, TERMS, BEFORE, {"a": (0.0, 0.0, 0.0)})
    assert (found.outcome, found.halvings, found.reason) == ("skip", None, "1 of 4 participants answered")
    assert decide(TRIALS, TERMS, BEFORE, {}).outcome == "skip"


def test_whoever_finds_every_loss_infinite_counts_as_silent() -> None:
    nothing = (math.inf,) * 3
    found = decide(TRIALS, TERMS, BEFORE, {"a": (0.5,) * 3, "b": nothing, "c": nothing, "d": nothing})
    assert (found.outcome, found.reason) == ("skip", "1 of 4 participants answered")
    found = decide(TRIALS, TERMS, BEFORE, {"a": (0.5,) * 3, "b": (0.5,) * 3, "c": nothing})
    assert (found.outcome, found.improved) == ("accepted", (1.0, 1.0, 1.0))


# ---- FedMDFG's line search -------------------------------------------------------------------------------

LINE = Line(s=5, beta=1e-4, stretch=1.0, guided=False, absent=False, slopes=dict.fromkeys("abc", 1.0))
SHORT = LINE.trials().halvings
GOOD = [10.0 if k < 5 else 0.5 for k in range(SHORT + 1)]  # whatever is longer than the usual step is too long


@pytest.mark.parametrize("bad", [[math.inf] * (SHORT + 1), [math.inf] * SHORT + [2.0], [1e300] * (SHORT + 1)])
def test_one_client_that_cannot_be_pleased_never_lengthens_the_step(bad: list[float]) -> None:
    verdict = decide(LINE.trials(), Terms(fallback="commit"), BEFORE_LINE, {"a": GOOD, "b": GOOD, "c": bad})
    assert LINE.trials().factor(verdict.halvings) <= 1.0


@pytest.mark.parametrize(("fallback", "factor"), [("commit", 1.0), ("smallest", 2.0**-5), ("skip", 0.0)])
def test_a_line_search_in_which_every_sum_is_infinite_ends_in_the_fallback(fallback: str, factor: float) -> None:
    long, short = [math.inf] * 5 + [2.0] * (SHORT - 4), [2.0] * 5 + [math.inf] * (SHORT - 4)
    terms = Terms(fallback=fallback)  # type: ignore[arg-type]
    verdict = decide(LINE.trials(), terms, BEFORE_LINE, {"a": GOOD, "b": long, "c": short})
    assert (verdict.outcome, LINE.trials().factor(verdict.halvings)) == (fallback, factor)
    assert "infinite" in verdict.reason


# ---- answers ---------------------------------------------------------------------------------------------


Proposing = Callable[[int], Proposal]


@pytest.fixture
def proposing(tmp_path: Path) -> Iterator[Proposing]:
    """A step that clients may halve so many times."""
    store, updates = Store(tmp_path / "proposing"), updates_of(0)
    store.create("test", initial(), Publication.of(0, initial()).digest)
    committer = Committer.open(store, 0, recipe("fedavg"))
    for client, (_, row) in updates.items():
        committer.add(client, row, updates)
    with ThreadPoolExecutor(1) as workers:
        proposal = committer.aggregate(updates, workers, Terms())
    assert isinstance(proposal, Proposal)
    yield lambda halvings: replace(proposal, trials=Trials(halvings))
    store.close()


@pytest.mark.parametrize("losses", [(1.0, math.nan, 1.0), (1.0, -math.inf, 1.0), (1.0, 1.0), (1.0,) * 4])
def test_losses_that_cannot_be_are_refused(proposing: Proposing, losses: tuple[float, ...]) -> None:
    with pytest.raises(BadRequest, match=f"sent {len(losses)} losses.*expected 3 numbers"):
        Verifying(proposing(2), {}).check("ann", losses)


def test_answers_to_other_lengths_of_the_step_are_asked_for_again(proposing: Proposing) -> None:
    stored = {"a": (0.5, 0.5, 0.5), "b": (0.5,) * 6, "c": None}
    assert Verifying(proposing(5), stored).to_ask("abcd", Sessions(1.0, 9, 0), "raw32") == {"a", "d"}


def test_an_answer_takes_the_place_of_an_earlier_one_to_the_same_step(tmp_path: Path, database: str | None) -> None:
    store = Store(tmp_path / "state", database)
    try:
        for found in ((1.0, 2.0), (1.0, 2.0, 3.0)):
            store.write(trial_write(0, "ann", b"step", found, ""))
        assert trials_of(store, 0, b"step") == {"ann": (1.0, 2.0, 3.0)}
    finally:
        store.close()


def test_whoever_is_silent_is_listed_so_even_if_it_sent_infinite_losses(proposing: Proposing) -> None:
    verifying = Verifying(proposing(1), {"a": (0.5, 0.5), "b": (math.inf, math.inf), "c": None})
    record = verifying.record(Verdict("accepted", "", 0), "abcd")
    assert (record["answered"], record["silent"]) == (["a"], ["b", "c", "d"])


def test_only_those_who_can_read_the_step_are_asked(proposing: Proposing) -> None:
    sessions = Sessions(1.0, 9, 0)
    for name, codecs, verifies in (
        ("both", ("raw32", "int8"), True),
        ("plain", ("raw32",), True),
        ("blind", ("int8",), False),
    ):
        sessions.join(Member(name, name, "cpu", 1, 1, codecs, verifies), 0.0)
    assert Verifying(proposing(1), {}).to_ask(["both", "plain", "blind"], sessions, "int8") == {"both"}
    assert Verifying(proposing(1), {}).to_ask(["both", "plain", "blind"], sessions, "raw32") == {"both", "plain"}


def test_a_lengthened_line_search_without_answers_falls_back_to_the_usual_step() -> None:
    lengthened = Trials(6, doublings=3, search=lambda *given, rate: Found(0, True))
    terms = Terms(fallback="commit")
    assert lengthened.factor(decide(lengthened, terms, BEFORE, {}).halvings) == 1.0


# ---- what is tried is what is taken ----------------------------------------------------------------------


def stepped(held: Model, change: Publication, codec: str) -> Model:
    """As a client gets it."""
    into = Model.empty(held.signature)
    decoder = Decoder(into, codec_named(codec))
    for message in change.messages_from(0):
        decoder.take(message)
    decoder.finish(change.digest)
    return into


@pytest.mark.parametrize(
    ("codec", "kept_in"),
    [(codec, "raw32") for codec in ("raw32", "fp16", "int8", "topk:0.1", "int8+zstd")]
    + [("raw32", "int8"), ("int8", "fp16"), ("topk:0.1", "int8")],
)
@pytest.mark.parametrize("halvings", [0, 1, 5, None])
def test_the_committed_model_has_the_bits_that_clients_tried(
    tmp_path: Path, codec: str, kept_in: str, halvings: int | None
) -> None:
    store, updates = Store(tmp_path), updates_of(0)
    store.create("test", initial(), Publication.of(0, initial()).digest)
    committer = Committer.open(store, 0, recipe("fedavg"), codec=codec, model_codec=kept_in)
    for client, (_, row) in updates.items():
        committer.add(client, row, updates)
    with ThreadPoolExecutor(1) as workers:
        proposal = committer.aggregate(updates, workers, Terms(halvings=5))
        assert isinstance(proposal, Proposal)
        tried = stepped(initial(), proposal.publication, committer.downlink.codec)
        if halvings is not None:
            add_change(initial(), tried, halvings, out=tried)
            if kept_in != "raw32":
                round_to(steady_codec(kept_in), tried.parameters)
        committed = committer.take(proposal, halvings, updates, workers)
    wanted = initial() if halvings is None else tried
    assert digest_of(wanted) == committed.publication.digest == committed.stored.digest
    store.close()


@pytest.mark.parametrize("codec", ["raw32", "int8"])
def test_a_verified_whole_step_is_the_step_that_would_have_been_taken_without(tmp_path: Path, codec: str) -> None:
    found = []
    for name, terms in (("verified", Terms()), ("plain", None)):
        store, updates = Store(tmp_path / name), updates_of(0)
        store.create("test", initial(), Publication.of(0, initial()).digest)
        committer = Committer.open(store, 0, recipe("fedavg"), codec=codec)
        for client, (_, row) in updates.items():
            committer.add(client, row, updates)
        with ThreadPoolExecutor(1) as workers:
            made = committer.aggregate(updates, workers, terms)
            committed = committer.take(made, 0, updates, workers) if isinstance(made, Proposal) else made
        found.append(committed.model.parameters.copy())
        store.close()
    if codec == "raw32":
        np.testing.assert_array_equal(*found)
    np.testing.assert_allclose(*found, atol=0.1)  # a lossy codec rounds another difference


@pytest.mark.parametrize("codec", ["raw32", "int8", "sign"])
def test_what_a_shortened_step_holds_back_is_made_good_later(codec: str) -> None:
    draw, downlink = np.random.default_rng(0), Downlink(codec)
    signature = initial().signature
    size = len(initial().parameters)
    published, master = np.zeros(size, np.float32), np.zeros(size)
    for version, halvings in enumerate((0, 1, 3, None, 0, 2) * 10, start=1):
        step = Model.empty(signature)
        wanted = draw.standard_normal(size).astype(np.float32)
        step.parameters[:] = wanted
        change = downlink.propose(step, version)
        if halvings is not None:
            master += 2.0**-halvings * wanted
            published += np.float32(2.0**-halvings) * step.parameters
        shortened = downlink.shorten(change, halvings)
        downlink.adopt(shortened)
        residual: Vector | float = 0.0 if shortened.residual is None else shortened.residual
        np.testing.assert_allclose(published + residual, master, atol=1e-3)


class Bowl:
    """Its loss is infinite outside, and its owner says so by raising or by a NaN."""

    def training_loss(self, model: Arrays) -> float:
        size = float(np.abs(model["w"]).max())
        return math.nan if size > 3 else size


def test_a_trial_that_diverges_counts_as_infinite() -> None:
    model, step = (Model.of({"w": np.full(3, value, np.float32)}) for value in (0.0, 8.0))
    assert isinstance(Bowl(), Measuring)
    found = list(trial_losses(Bowl(), model, step, 3, lambda done, planned, loss: None))
    assert found == [math.inf, math.inf, 2.0, 1.0]


class Watching:
    """Keeps the models whose loss it is asked for."""

    def __init__(self) -> None:
        self.seen: list[Vector] = []

    def training_loss(self, model: Arrays) -> float:
        self.seen.append(model["w"].reshape(-1).copy())
        return 1.0


def test_models_are_tried_as_they_would_be_published() -> None:
    model, step = (Model.of({"w": np.full(300, value, np.float32)}) for value in (1.0, 1 / 3))
    watching = Watching()
    list(trial_losses(watching, model, step, 1, lambda done, planned, loss: None, "int8"))
    assert [is_exact(steady_codec("int8"), one) for one in watching.seen] == [True, True]
    list(trial_losses(watching, model, step, 1, lambda done, planned, loss: None))
    assert not any(is_exact(steady_codec("int8"), one) for one in watching.seen[2:])
