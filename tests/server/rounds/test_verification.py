"""The step that is taken depends on reported losses, and is exactly what clients tried."""

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
from fairfleet.client.training.step_trials import trial_losses
from fairfleet.common.chunk_stream import Decoder, digest_of
from fairfleet.common.codecs import codec_named, is_exact, round_to, steady_codec
from fairfleet.common.errors import BadRequest
from fairfleet.common.tensors import Arrays, Model, Vector, add_change
from fairfleet.common.training_plan import Plan
from fairfleet.server.aggregation.results import ServerState
from fairfleet.server.federation.clients.feature_requirements import required_features
from fairfleet.server.federation.clients.sessions import ClientDescription, Sessions
from fairfleet.server.federation.model_committer import CommitterOptions, ModelCommitter
from fairfleet.server.federation.staged_model import StepProposal
from fairfleet.server.federation.step_verification import StepVerification
from fairfleet.server.rounds.verification import StepVerdict, VerificationPolicy, decide
from fairfleet.server.rules import LineSearchResult, StepTrials, optimizer, recipe
from fairfleet.server.rules.directions.fedmdfg import SearchLine
from fairfleet.server.rules.optimizers import OPTIMIZERS
from fairfleet.server.storage.step_queries import trial_write, trials_of
from fairfleet.server.storage.store import Store
from fairfleet.server.transfer.downlink import Downlink
from fairfleet.server.transfer.published_model import PublishedModel
from tests.support.samples.updates import initial, updates_of

BEFORE = {"a": 1.0, "b": 1.0, "c": 1.0, "d": 1.0}
BEFORE_LINE = {"a": 1.0, "b": 1.0, "c": 1.0}
POLICY = VerificationPolicy(halvings=2, threshold=0.75, quorum=0.5, fallback="skip")
TRIALS = StepTrials(2)

losses = st.floats(0.0, 2.0) | st.just(math.inf)
answers = st.dictionaries(st.sampled_from("abcd"), st.tuples(losses, losses, losses))


def test_the_longest_step_under_which_enough_losses_fall_is_taken() -> None:
    verdict = decide(
        TRIALS,
        POLICY,
        BEFORE,
        {"a": (2, 0.5, 0.9), "b": (2, 0.5, 0.9), "c": (0, 0.5, 0.9), "d": (2, 2, 2)},
    )
    assert (verdict.outcome, verdict.halvings, verdict.improved) == (
        "accepted",
        1,
        (0.25, 0.75, 0.75),
    )


def test_a_loss_that_stays_the_same_or_is_infinite_has_not_fallen() -> None:
    verdict = decide(TRIALS, POLICY, {"a": 1.0}, {"a": (math.inf, 1.0, 0.5)})
    assert (verdict.halvings, verdict.improved) == (2, (0.0, 0.0, 1.0))


@given(
    answers,
    st.sampled_from((0.25, 0.5, 0.75, 1.0)),
    st.sampled_from(("commit", "smallest", "skip")),
)
def test_a_step_is_accepted_if_and_only_if_the_share_reaches_the_threshold(
    reported: dict[str, tuple[float, ...]], threshold: float, fallback: str
) -> None:
    policy = VerificationPolicy(
        halvings=2,
        threshold=threshold,
        quorum=0.5,
        fallback=fallback,  # type: ignore[arg-type]
    )
    verdict = decide(TRIALS, policy, BEFORE, reported)
    useful = {client: tried for client, tried in reported.items() if min(tried) < math.inf}
    shares = (
        [np.mean([tried[k] < 1.0 for tried in useful.values()]) for k in range(3)]
        if len(useful) >= 2
        else []
    )
    enough = [k for k, share in enumerate(shares) if share >= threshold]
    if enough:
        assert (verdict.outcome, verdict.halvings) == ("accepted", enough[0])
    else:
        assert verdict.outcome == fallback
        assert verdict.halvings == {"commit": 0, "smallest": 2, "skip": None}[fallback]


def test_too_few_answers_lead_to_the_fallback() -> None:
    verdict = decide(TRIALS, POLICY, BEFORE, {"a": (0.0, 0.0, 0.0)})
    assert (verdict.outcome, verdict.halvings, verdict.reason) == (
        "skip",
        None,
        "1 of 4 participants answered",
    )
    assert decide(TRIALS, POLICY, BEFORE, {}).outcome == "skip"


def test_a_client_whose_losses_are_all_infinite_counts_as_silent() -> None:
    nothing = (math.inf,) * 3
    verdict = decide(
        TRIALS, POLICY, BEFORE, {"a": (0.5,) * 3, "b": nothing, "c": nothing, "d": nothing}
    )
    assert (verdict.outcome, verdict.reason) == ("skip", "1 of 4 participants answered")
    verdict = decide(TRIALS, POLICY, BEFORE, {"a": (0.5,) * 3, "b": (0.5,) * 3, "c": nothing})
    assert (verdict.outcome, verdict.improved) == ("accepted", (1.0, 1.0, 1.0))


# ---- FedMDFG's line search ---------------------------------------------------------------------

LINE = SearchLine(
    s=5, beta=1e-4, stretch=1.0, guided=False, absent=False, slopes=dict.fromkeys("abc", 1.0)
)
SHORT = LINE.trials().halvings
# Every step longer than the usual one is too long.
GOOD = [10.0 if k < 5 else 0.5 for k in range(SHORT + 1)]


@pytest.mark.parametrize(
    "bad", [[math.inf] * (SHORT + 1), [math.inf] * SHORT + [2.0], [1e300] * (SHORT + 1)]
)
def test_one_client_with_huge_losses_never_lengthens_the_step(bad: list[float]) -> None:
    verdict = decide(
        LINE.trials(),
        VerificationPolicy(fallback="commit"),
        BEFORE_LINE,
        {"a": GOOD, "b": GOOD, "c": bad},
    )
    assert LINE.trials().factor(verdict.halvings) <= 1.0


def test_one_client_with_impossibly_low_losses_never_lengthens_the_step() -> None:
    worse = [50.0] * (SHORT + 1)
    answers = {"a": worse, "b": worse, "c": [-1.7e308] * (SHORT + 1)}
    verdict = decide(LINE.trials(), VerificationPolicy(fallback="commit"), BEFORE_LINE, answers)
    assert LINE.trials().factor(verdict.halvings) <= 1.0


@pytest.mark.parametrize(
    ("fallback", "factor"), [("commit", 1.0), ("smallest", 2.0**-5), ("skip", 0.0)]
)
def test_a_line_search_with_infinite_sums_only_ends_in_the_fallback(
    fallback: str, factor: float
) -> None:
    long, short = [math.inf] * 5 + [2.0] * (SHORT - 4), [2.0] * 5 + [math.inf] * (SHORT - 4)
    policy = VerificationPolicy(fallback=fallback)  # type: ignore[arg-type]
    verdict = decide(LINE.trials(), policy, BEFORE_LINE, {"a": GOOD, "b": long, "c": short})
    assert (verdict.outcome, LINE.trials().factor(verdict.halvings)) == (fallback, factor)
    assert "infinite" in verdict.reason


# ---- answers -----------------------------------------------------------------------------------


Proposing = Callable[[int], StepProposal]


@pytest.fixture
def proposing(tmp_path: Path) -> Iterator[Proposing]:
    """Yield a function that returns a proposed step with so many halvings."""
    store, updates = Store(tmp_path / "proposing"), updates_of(0)
    store.create("test", initial(), PublishedModel.of(0, initial()).digest)
    committer = ModelCommitter.open(store, 0, recipe("fedavg"))
    for client, (_, row) in updates.items():
        committer.add(client, row, updates)
    with ThreadPoolExecutor(1) as workers:
        proposal = committer.aggregate(updates, workers, VerificationPolicy())
    assert isinstance(proposal, StepProposal)
    yield lambda halvings: replace(proposal, trials=StepTrials(halvings))
    store.close()


@pytest.mark.parametrize(
    "losses", [(1.0, math.nan, 1.0), (1.0, -math.inf, 1.0), (1.0, 1.0), (1.0,) * 4]
)
def test_impossible_losses_are_refused(proposing: Proposing, losses: tuple[float, ...]) -> None:
    with pytest.raises(BadRequest, match=f"sent {len(losses)} losses.*expected 3 numbers"):
        StepVerification(proposing(2), {}).check("ann", losses)


def test_answers_about_other_step_lengths_are_requested_again(proposing: Proposing) -> None:
    stored = {"a": (0.5, 0.5, 0.5), "b": (0.5,) * 6, "c": None}
    assert StepVerification(proposing(5), stored).to_ask("abcd", Sessions(1.0, 9, 0), "raw32") == {
        "a",
        "d",
    }


def test_an_answer_replaces_an_earlier_one_about_the_same_step(
    tmp_path: Path, database: str | None
) -> None:
    store = Store(tmp_path / "state", database)
    try:
        for answer in ((1.0, 2.0), (1.0, 2.0, 3.0)):
            store.write(trial_write(0, "ann", b"step", answer, ""))
        assert trials_of(store, 0, b"step") == {"ann": (1.0, 2.0, 3.0)}
    finally:
        store.close()


def test_a_client_that_sent_only_infinite_losses_is_listed_as_silent(
    proposing: Proposing,
) -> None:
    verifying = StepVerification(
        proposing(1), {"a": (0.5, 0.5), "b": (math.inf, math.inf), "c": None}
    )
    record = verifying.record(StepVerdict("accepted", "", 0), "abcd")
    assert (record.answered, record.silent) == (("a",), ("b", "c", "d"))


def test_only_clients_that_can_decode_the_step_are_selected(proposing: Proposing) -> None:
    sessions = Sessions(1.0, 9, 0)
    for name, codecs, verifies in (
        ("both", ("raw32", "int8"), True),
        ("plain", ("raw32",), True),
        ("blind", ("int8",), False),
    ):
        sessions.join(ClientDescription(name, name, "cpu", 1, 1, codecs, verifies), 0.0)
    assert StepVerification(proposing(1), {}).to_ask(
        ["both", "plain", "blind"], sessions, "int8"
    ) == {"both"}
    assert StepVerification(proposing(1), {}).to_ask(
        ["both", "plain", "blind"], sessions, "raw32"
    ) == {"both", "plain"}


def test_only_clients_with_the_required_features_are_selected(proposing: Proposing) -> None:
    sessions = Sessions(1.0, 9, 0)
    for name, features in (("new", frozenset({"counts"})), ("old", frozenset[str]())):
        member = ClientDescription(name, name, "cpu", 1, 1, ("raw32",), True, features=features)
        sessions.join(member, 0.0)
    requirements = required_features(Plan(), always=["counts"])
    assert StepVerification(proposing(1), {}).to_ask(
        ["new", "old"], sessions, "raw32", requirements
    ) == {"new"}


def test_a_lengthened_line_search_without_answers_falls_back_to_the_usual_step() -> None:
    lengthened = StepTrials(6, doublings=3, search=lambda *given, rate: LineSearchResult(0, True))
    policy = VerificationPolicy(fallback="commit")
    assert lengthened.factor(decide(lengthened, policy, BEFORE, {}).halvings) == 1.0


# ---- the step taken is the step tried ----------------------------------------------------------


def decode_step(model: Model, change: PublishedModel, codec: str) -> Model:
    """Return a step as a client decodes it."""
    into = Model.empty(model.signature)
    decoder = Decoder(into, codec_named(codec))
    for message in change.messages_from(0):
        decoder.take(message)
    decoder.finish(change.digest)
    return into


@pytest.mark.parametrize(
    ("codec", "model_codec"),
    [(codec, "raw32") for codec in ("raw32", "fp16", "int8", "topk:0.1", "int8+zstd")]
    + [("raw32", "int8"), ("int8", "fp16"), ("topk:0.1", "int8")],
)
@pytest.mark.parametrize("halvings", [0, 1, 5, None])
def test_the_committed_model_has_the_bits_that_clients_tried(
    tmp_path: Path, codec: str, model_codec: str, halvings: int | None
) -> None:
    store, updates = Store(tmp_path), updates_of(0)
    store.create("test", initial(), PublishedModel.of(0, initial()).digest)
    committer = ModelCommitter.open(
        store, 0, recipe("fedavg"), CommitterOptions(codec=codec, model_codec=model_codec)
    )
    for client, (_, row) in updates.items():
        committer.add(client, row, updates)
    with ThreadPoolExecutor(1) as workers:
        proposal = committer.aggregate(updates, workers, VerificationPolicy(halvings=5))
        assert isinstance(proposal, StepProposal)
        tried = decode_step(initial(), proposal.publication, committer.downlink.codec)
        if halvings is not None:
            add_change(initial(), tried, halvings, out=tried)
            if model_codec != "raw32":
                round_to(steady_codec(model_codec), tried.parameters)
        committed = committer.take(proposal, halvings, updates, workers)
    expected = initial() if halvings is None else tried
    assert digest_of(expected) == committed.publication.digest == committed.stored.digest
    store.close()


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_a_skipped_step_is_forgotten_by_the_optimizer(tmp_path: Path, name: str) -> None:
    after = optimizer(name, momentum=0.9) if name == "sgd" else optimizer(name)
    state = ServerState(None, after.initial(len(initial().parameters)))
    before = {key: vector.copy() for key, vector in state.optimizer.vectors.items()}
    store, updates = Store(tmp_path), updates_of(0)
    store.create("test", initial(), PublishedModel.of(0, initial()).digest)
    opened = ModelCommitter.open(store, 0, recipe("fedavg", after))
    opened._state = state
    for client, (_, row) in updates.items():
        opened.add(client, row, updates)
    with ThreadPoolExecutor(1) as workers:
        proposal = opened.aggregate(updates, workers, VerificationPolicy(halvings=1))
        opened.take(proposal, None, updates, workers).written.result()
    for key, vector in before.items():
        np.testing.assert_array_equal(state.optimizer.vectors[key], vector)
    store.close()


@pytest.mark.parametrize("codec", ["raw32", "int8"])
def test_a_verified_full_step_equals_the_step_without_verification(
    tmp_path: Path, codec: str
) -> None:
    models = []
    for name, policy in (("verified", VerificationPolicy()), ("plain", None)):
        store, updates = Store(tmp_path / name), updates_of(0)
        store.create("test", initial(), PublishedModel.of(0, initial()).digest)
        committer = ModelCommitter.open(store, 0, recipe("fedavg"), CommitterOptions(codec=codec))
        for client, (_, row) in updates.items():
            committer.add(client, row, updates)
        with ThreadPoolExecutor(1) as workers:
            result = committer.aggregate(updates, workers, policy)
            committed = (
                committer.take(result, 0, updates, workers)
                if isinstance(result, StepProposal)
                else result
            )
        models.append(committed.model.parameters.copy())
        store.close()
    if codec == "raw32":
        np.testing.assert_array_equal(*models)
    np.testing.assert_allclose(*models, atol=0.1)  # a lossy codec rounds a different vector


@pytest.mark.parametrize("codec", ["raw32", "int8", "sign"])
def test_the_residual_of_a_shortened_step_is_added_later(codec: str) -> None:
    draw, downlink = np.random.default_rng(0), Downlink(codec)
    signature = initial().signature
    size = len(initial().parameters)
    published, master = np.zeros(size, np.float32), np.zeros(size)
    for version, halvings in enumerate((0, 1, 3, None, 0, 2) * 10, start=1):
        step = Model.empty(signature)
        exact = draw.standard_normal(size).astype(np.float32)
        step.parameters[:] = exact
        change = downlink.propose(step, version)
        if halvings is not None:
            master += 2.0**-halvings * exact
            published += np.float32(2.0**-halvings) * step.parameters
        shortened = downlink.shorten(change, halvings)
        downlink.adopt(shortened)
        residual: Vector | float = 0.0 if shortened.residual is None else shortened.residual
        np.testing.assert_allclose(published + residual, master, atol=1e-3)


class Bowl:
    """A task whose loss is NaN outside a cube."""

    def training_loss(self, model: Arrays) -> float:
        """Return the largest parameter; NaN beyond 3."""
        size = float(np.abs(model["w"]).max())
        return math.nan if size > 3 else size


def test_a_trial_that_diverges_counts_as_infinite() -> None:
    model, step = (Model.of({"w": np.full(3, value, np.float32)}) for value in (0.0, 8.0))
    assert isinstance(Bowl(), Measuring)
    losses = list(trial_losses(Bowl(), model, step, 3, lambda done, planned, loss: None))
    assert losses == [math.inf, math.inf, 2.0, 1.0]


class Watching:
    """A task that keeps the models whose loss it computes."""

    def __init__(self) -> None:
        self.seen: list[Vector] = []

    def training_loss(self, model: Arrays) -> float:
        """Keep the model."""
        self.seen.append(model["w"].reshape(-1).copy())
        return 1.0


def test_clients_try_the_model_that_would_be_published() -> None:
    model, step = (Model.of({"w": np.full(300, value, np.float32)}) for value in (1.0, 1 / 3))
    watching = Watching()
    list(trial_losses(watching, model, step, 1, lambda done, planned, loss: None, "int8"))
    assert [is_exact(steady_codec("int8"), values) for values in watching.seen] == [True, True]
    list(trial_losses(watching, model, step, 1, lambda done, planned, loss: None))
    assert not any(is_exact(steady_codec("int8"), values) for values in watching.seen[2:])
