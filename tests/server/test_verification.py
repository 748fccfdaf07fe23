"""Which step is taken, by what clients say of their losses; and that what is taken is what they tried."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairfleet.client.task import Measuring
from fairfleet.client.trying import trial_losses
from fairfleet.common.codecs import codec_named
from fairfleet.common.stream import Decoder, digest_of
from fairfleet.common.tensors import Arrays, Model, Vector, add_change
from fairfleet.server.committing import Committer, Proposal
from fairfleet.server.downlink import Downlink
from fairfleet.server.publication import Publication
from fairfleet.server.rules import recipe
from fairfleet.server.rules.base import Found, Trials
from fairfleet.server.store import Store
from fairfleet.server.verification import Terms, decide
from tests.server.test_committing import initial, updates_of

BEFORE = {"a": 1.0, "b": 1.0, "c": 1.0, "d": 1.0}
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


@pytest.mark.parametrize("codec", ["raw32", "fp16", "int8", "topk:0.1", "int8+zstd"])
@pytest.mark.parametrize("halvings", [0, 1, 5, None])
def test_the_committed_model_has_the_bits_that_clients_tried(tmp_path: Path, codec: str, halvings: int | None) -> None:
    store, updates = Store(tmp_path), updates_of(0)
    store.create("test", initial(), Publication.of(0, initial()).digest)
    committer = Committer.open(store, 0, recipe("fedavg"), codec=codec)
    for client, (_, row) in updates.items():
        committer.add(client, row, updates)
    with ThreadPoolExecutor(1) as workers:
        proposal = committer.aggregate(updates, workers, Terms(halvings=5))
        assert isinstance(proposal, Proposal)
        tried = stepped(initial(), proposal.publication, committer.downlink.codec)
        if halvings is not None:
            add_change(initial(), tried, halvings, out=tried)
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
