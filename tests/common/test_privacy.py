"""Clipping keeps its bound for any input, and noise has the stated distribution."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fairfleet.client.update.error_feedback import StoredResidual
from fairfleet.client.update.spool import Spool
from fairfleet.common.chunk_stream import Decoder
from fairfleet.common.codecs import codec_named, roundtrip
from fairfleet.common.privacy import (
    GRID_BITS,
    Noise,
    PrivacyTerms,
    ReportTerms,
    SeededNoise,
    SystemNoise,
    add_noise,
    blurred,
    clip,
    norm,
    protect,
    protect_update,
    protected_evaluation,
    protected_report,
)
from fairfleet.common.reports import Evaluation, TrainReport
from fairfleet.common.tensors import Model, Vector
from fairfleet.common.training_plan import Plan

CODECS = ("raw32", "fp16", "bf16", "int8", "int4", "sign", "topk:0.1", "topsign:0.1", "int8+zstd")
values = st.floats(-(2.0**100), 2.0**100, width=32)
vectors = arrays(np.float32, st.integers(0, 200), elements=values)
bounds = st.floats(1e-6, 1e6)
REPORTS = ReportTerms(noise_multiplier=0.5, loss_bound=4.0, gradient_bound=8.0)


def exact_norm(vector: Vector) -> float:
    return math.sqrt(math.fsum(float(value) ** 2 for value in vector))


@given(vectors, bounds)
@example(np.full(7, 1 / 3, np.float32), 0.3)
@example(np.full(3, 1e-45, np.float32), 1e-45)
def test_clipping_keeps_the_bound_for_every_vector(vector: Vector, bound: float) -> None:
    clip(vector, bound)
    assert exact_norm(vector) <= bound * (1 + 1e-14)  # The sum in this test has rounding errors.


@given(vectors, bounds)
def test_clipping_keeps_the_direction_and_does_not_change_short_vectors(
    vector: Vector, bound: float
) -> None:
    before = vector.copy()
    length = clip(vector, bound)
    if length <= bound:
        assert (vector == before).all()
    elif bound > 1e-3:
        scaled = before.astype(np.float64) * (bound / length)
        np.testing.assert_allclose(vector, scaled, rtol=1e-4, atol=1e-30)


@pytest.mark.parametrize("codec", CODECS)
@settings(max_examples=25)
@given(
    vector=arrays(np.float32, st.integers(1, 200), elements=st.floats(-100, 100, width=32)),
    bound=bounds,
)
def test_the_server_can_clip_the_output_of_every_codec(
    codec: str, vector: Vector, bound: float
) -> None:
    arrived = roundtrip(codec, vector, 1).decoded
    clip(arrived, bound)
    assert exact_norm(arrived) <= bound * (1 + 1e-14)


def test_values_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ValueError, match="not finite"):
        clip(np.array([1.0, np.inf], np.float32), 1.0)


def test_an_update_of_zeros_becomes_pure_noise() -> None:
    nothing = np.zeros(50_000, np.float32)
    assert clip(nothing, 1.0) == 0.0
    assert not nothing.any()
    protect(nothing, PrivacyTerms(clip=2.0, noise_multiplier=1.5), SystemNoise())
    assert float(np.std(nothing)) == pytest.approx(3.0, rel=0.03)
    empty = np.zeros(0, np.float32)
    protect(empty, PrivacyTerms(clip=1.0, noise_multiplier=1.0), SystemNoise())


@pytest.mark.parametrize("noise", [SystemNoise(), SeededNoise(1)])
@pytest.mark.parametrize("deviation", [1e-6, 0.7, 1e5])
def test_the_noise_is_gaussian_with_the_stated_deviation(noise: Noise, deviation: float) -> None:
    count = 200_001  # For an odd number, one more value is drawn and discarded.
    drawn = np.zeros(count, np.float32)
    add_noise(drawn, deviation, noise)
    shape = drawn.astype(np.float64) / deviation
    assert abs(shape.mean()) < 6 / math.sqrt(count)
    assert abs((shape**2).mean() - 1) < 6 * math.sqrt(2 / count)
    assert abs((shape**4).mean() - 3) < 6 * math.sqrt(96 / count)
    assert abs((shape[:-1] * shape[1:]).mean()) < 6 / math.sqrt(count)
    assert (np.abs(shape) > 3).mean() == pytest.approx(0.0027, rel=0.25)
    grid = 2.0 ** (math.floor(math.log2(deviation)) - GRID_BITS)
    assert (np.remainder(drawn.astype(np.float64), grid) == 0).all()


def test_system_noise_never_repeats_and_seeded_noise_does() -> None:
    assert (SystemNoise().normal(100) != SystemNoise().normal(100)).all()
    assert (SeededNoise(3, 1).normal(100) == SeededNoise(3, 1).normal(100)).all()
    assert (SeededNoise(3, 1).normal(100) != SeededNoise(3, 2).normal(100)).all()


def test_an_update_without_clip_is_not_changed() -> None:
    received, trained = model(1.0), model(0.25)
    protect_update(received, trained, PrivacyTerms(reports=REPORTS), SystemNoise())
    assert (trained.parameters == np.float32(0.25)).all()


@pytest.mark.parametrize("codec", ["int8", "topk:0.1", "topsign:0.1", "sign"])
def test_the_residual_depends_only_on_noised_updates(tmp_path: Path, codec: str) -> None:
    """The sent updates plus the residual equal the sum of the noised updates."""
    spool, received, noise = Spool(tmp_path), model(0.0), SeededNoise(1)
    sent, noised = np.zeros(1000, np.float64), np.zeros(1000, np.float64)
    for number in range(5):
        trained = model(-3.0 - number)
        protect_update(received, trained, PrivacyTerms(clip=1.0, noise_multiplier=0.5), noise)
        noised += received.parameters - trained.parameters
        spooled = spool.write(
            received, trained, report(),
            federation="f", round_number=number, model_digest="", codec=codec,
            error_feedback=True, terms=PrivacyTerms(clip=1.0, noise_multiplier=0.5),
        )  # fmt: skip
        decoded = Model.empty(received.signature)
        decoder = Decoder(decoded, codec_named(codec))
        for message in spool.messages_from(0):
            decoder.take(message)
        sent += decoded.parameters
        spool.settle(spooled, counted=True)
    residual = StoredResidual(tmp_path)
    stored = residual.of("f, with noise", received.signature, 99)
    assert stored is not None
    np.testing.assert_allclose(sent + stored, noised, atol=1e-4)
    assert (
        residual.of("f", received.signature, 99) is None
    )  # It is never added to updates without noise, or computed from them.


def test_a_residual_without_noise_is_not_added_to_a_noised_update(tmp_path: Path) -> None:
    spool, received = Spool(tmp_path), model(0.0)
    named = {"federation": "f", "model_digest": "", "codec": "topk:0.01", "error_feedback": True}
    plain = spool.write(received, model(-3.0), report(), round_number=0, **named)
    spool.settle(plain, counted=True)
    assert StoredResidual(tmp_path).of("f", received.signature, 1) is not None
    noised = spool.write(
        received,
        model(0.0),
        report(),
        round_number=1,
        terms=PrivacyTerms(clip=1.0, noise_multiplier=1.0),
        **named,
    )
    decoded = Model.empty(received.signature)
    decoder = Decoder(decoded, codec_named("topk:0.01"))
    for message in spool.messages_from(0):
        decoder.take(message)
    assert noised.terms.noise_multiplier == 1.0
    assert not decoded.parameters.any()


@given(st.floats(-1e9, 1e9), st.floats(1e-3, 1e3), st.floats(1e-3, 100))
def test_a_reported_number_lies_between_0_and_its_bound(
    value: float, bound: float, multiplier: float
) -> None:
    assert 0.0 <= blurred(value, bound, multiplier, SystemNoise()) <= bound


def test_a_reported_number_has_the_stated_noise() -> None:
    drawn = [
        blurred(50.0, 100.0, 0.05, SystemNoise()) for _ in range(4000)
    ]  # Both ends are ten deviations away.
    assert float(np.mean(drawn)) == pytest.approx(50.0, abs=0.5)
    assert float(np.std(drawn)) == pytest.approx(5.0, rel=0.1)


def test_a_protected_report_contains_no_exact_value() -> None:
    protected = protected_report(
        report(), Plan(epochs=3, learning_rate=0.3), REPORTS, SystemNoise()
    )
    assert (protected.samples, protected.steps, protected.planned_steps, protected.batch_size) == (
        1,
        1,
        0,
        0,
    )
    assert (protected.seconds, protected.cut_by, protected.accuracy) == (0.0, (), None)
    assert (protected.loss_before != 2.0, protected.loss_after) == (True, None)
    assert protected.gradient_norm != 3.0
    assert protected.initial_loss is None
    late = report().model_copy(update={"initial_loss": 2.5})
    initial = protected_report(late, Plan(), REPORTS, SystemNoise()).initial_loss
    assert initial not in (None, 2.5)
    needed = REPORTS.model_copy(update={"accuracy": True})
    assert protected_report(report(), Plan(), needed, SystemNoise()).accuracy != 0.625
    evaluation = Evaluation(
        samples=7, loss=2.0, accuracy=0.625, personal_loss=1.0, personal_accuracy=0.875
    )
    evaluated = protected_evaluation(evaluation, REPORTS, SystemNoise())
    assert (evaluated.samples, evaluated.personal_loss, evaluated.personal_accuracy) == (
        1,
        None,
        None,
    )
    assert evaluated.loss != 2.0
    assert evaluated.accuracy != 0.625


def test_the_norm_is_computed_in_float64() -> None:
    many = np.full(3_000_001, 1e-4, np.float32)
    assert norm(many) == pytest.approx(float(np.float32(1e-4)) * math.sqrt(3_000_001), rel=1e-12)


def model(value: float) -> Model:
    return Model.of({"weight": np.full(1000, value, np.float32)})


def report() -> TrainReport:
    return TrainReport(
        samples=70,
        loss_before=2.0,
        loss_after=1.0,
        steps=9,
        learning_rate=0.1,
        gradient_norm=3.0,
        seconds=1.5,
        accuracy=0.625,
        planned_steps=12,
        batch_size=8,
        cut_by=("steps",),
    )
