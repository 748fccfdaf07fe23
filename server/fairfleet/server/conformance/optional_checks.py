"""The checks of the levels compressed, delta, verify and private.

What a client trained is not known here. Where a check needs to know an update, it asks for a
training with a learning rate so small that the model does not move: the update is then what the
level adds to it.
"""

from __future__ import annotations

import math

import numpy as np

from fairfleet.common.chunk_stream import split
from fairfleet.common.features import INITIAL_LOSS
from fairfleet.common.tensors import Vector
from fairfleet.proto.v1 import fleet_pb2 as pb
from fairfleet.server.conformance.basic_checks import NotApplicable
from fairfleet.server.conformance.bench import Bench
from fairfleet.server.conformance.observed_calls import CallLog, CheckFailed, ObservedCall

TINY_RATE = 1e-30
INT8_BLOCK = 256
WRONG_HALVINGS = 3
PRIVACY = pb.Privacy(
    clip=0.05,
    noise_multiplier=2e-4,
    reports=pb.ReportNoise(noise_multiplier=1.0, loss_bound=5.0, gradient_bound=5.0),
)


def still(response: pb.NextTaskResponse) -> None:
    """Let a training leave the parameters where they are."""
    if response.HasField("train"):
        response.train.plan.learning_rate = TINY_RATE


# ---- compressed --------------------------------------------------------------------------------


async def offers_int8(bench: Bench) -> None:
    """Join offers int8."""
    if "int8" not in bench.joined.codecs:
        raise CheckFailed(f"codecs are {list(bench.joined.codecs)}; expected int8 among them")


async def sends_int8(bench: Bench) -> None:
    """Updates are sent in int8."""
    receipt, update = await bench.update_of(bench.next_round)
    if receipt.request.codec != "int8":
        raise CheckFailed(f"the update is in {receipt.request.codec}; the task asked for int8")
    if not np.any(update.parameters):
        raise CheckFailed("the update has only zeros; expected the result of a training")


async def feeds_errors_back(bench: Bench) -> None:
    """What an update lost is in the next one."""
    round_number = bench.next_round
    bench.faults.change_task(round_number + 1, still)
    await _check_residual(bench, round_number)


async def keeps_errors_of_refused_updates(bench: Bench) -> None:
    """After an update that does not count, nothing is lost either."""
    round_number = bench.next_round
    bench.faults.change_task(round_number + 1, still)
    bench.faults.refused_round = round_number + 1
    await _check_residual(bench, round_number)
    if not any(call.request.round == round_number + 1 for call in bench.log.named("TurnedDown")):
        raise CheckFailed("no update was announced that could be refused")


async def _check_residual(bench: Bench, round_number: int) -> None:
    """Check the update of the round after this one, in which the model does not move.

    It has what the update of this round lost to rounding, and nothing else.
    """
    first, _ = await bench.update_of(round_number)
    steps = scales_of(bench.log, first.request.digest)
    _, second = await bench.update_of(round_number + 1)
    is_rounded = steps > 0
    lost = np.abs(second.parameters)
    # Rounding loses any part of a step, so a share below a fiftieth is small.
    share = float(np.mean(lost[is_rounded] > 0.02 * steps[is_rounded])) if is_rounded.any() else 0.0
    if share < 0.5:
        raise CheckFailed(
            f"after a training that changed nothing, {share:.0%} of the values are what rounding "
            "can have lost; expected at least half of them"
        )
    # Nothing lost is larger than a scale, and it is rounded once more.
    if (lost > 1.02 * steps + 1e-12).any():
        raise CheckFailed(
            "after a training that changed nothing, values are larger than the update before "
            "can have lost: error feedback adds too much"
        )


def scales_of(log: CallLog, digest: bytes) -> Vector:
    """Return the scale of every parameter of an update in int8."""
    parts = []
    for message in log.chunks_of(digest):
        chunk, data = split(message)
        if chunk.section == 1:
            count = -(-chunk.elements // INT8_BLOCK)
            scales = np.frombuffer(data[: 4 * count], "<f4")
            parts.append(np.repeat(scales, INT8_BLOCK)[: chunk.elements])
    return np.concatenate(parts)


# ---- delta -------------------------------------------------------------------------------------


async def applies_changes(bench: Bench) -> None:
    """A change is applied to the exact model."""
    position = bench.log.position
    change = await bench.log.next(
        "Fetched", position, "a download of a change", lambda call: call.request.change
    )
    version = change.request.version
    await bench.log.next(
        "Receipt",
        change.number,
        f"an update on version {version}, whose change is enough",
        lambda call: call.request.round == version,
        forbidden=["FetchModel"],
        is_forbidden=lambda call: call.request.version == version and not call.request.change,
    )


async def notices_a_wrong_change(bench: Bench) -> None:
    """A change that does not lead to the model is noticed."""
    version = bench.next_round + 1
    bench.faults.change_task(version, _misled)

    def is_whole(call: ObservedCall) -> bool:
        return bool(call.request.version == version and not call.request.change)

    change = await bench.log.next(
        "FetchModel",
        0,
        f"a download of the change to version {version}",
        lambda call: call.request.version == version and call.request.change,
    )
    await bench.log.next(
        "FetchModel",
        change.number,
        f"a download of the whole version {version}, because the change leads elsewhere",
        is_whole,
        forbidden=["SendUpload"],
    )


def _misled(response: pb.NextTaskResponse) -> None:
    for change in response.train.model.changes:  # there is no evaluation in this level
        change.halvings += WRONG_HALVINGS


# ---- verify ------------------------------------------------------------------------------------


async def offers_verification(bench: Bench) -> None:
    """Join offers to verify steps."""
    if not bench.joined.verifies:
        raise CheckFailed("JoinRequest.verifies is not set")


async def measures_steps(bench: Bench) -> None:
    """Losses of trial steps are reported."""
    position = bench.log.position
    task = await bench.log.next(
        "Task", position, "a VerifyTask", lambda call: call.response.HasField("verify")
    )
    expected = task.response.verify.halvings + 1
    report = await bench.log.next("ReportVerification", task.number, "the losses of a step")
    if report.request.failure:
        raise CheckFailed(f"the step could not be tried: {report.request.failure}")
    if len(report.request.losses) != expected:
        raise CheckFailed(f"found {len(report.request.losses)} losses; expected {expected}")


async def measures_the_initial_loss(bench: Bench) -> None:
    """The loss on the model of `initial_model` is reported."""
    if INITIAL_LOSS not in bench.joined.features:
        raise NotApplicable(f"JoinRequest.features has no {INITIAL_LOSS}")
    round_number = bench.next_round
    bench.faults.change_task(round_number, _measured)
    receipt, _ = await bench.update_of(round_number)
    report = receipt.request.report
    if not report.HasField("initial_loss"):
        raise CheckFailed("report.initial_loss is missing; the task has initial_model")
    if not math.isclose(report.initial_loss, report.loss_before, rel_tol=1e-3, abs_tol=1e-6):
        raise CheckFailed(
            f"report.initial_loss is {report.initial_loss:.6g} and loss_before "
            f"{report.loss_before:.6g}; expected the same loss, because initial_model was the "
            "model to train"
        )


def _measured(response: pb.NextTaskResponse) -> None:
    """Ask for the loss on the very model that is trained: both losses are then the same."""
    if response.HasField("train"):
        model = response.train.model
        response.train.initial_model.version = model.version
        response.train.initial_model.digest = model.digest
        response.train.initial_model.size_bytes = model.size_bytes
        response.train.report_fields.append("initial_loss")


# ---- private -----------------------------------------------------------------------------------


async def offers_privacy(bench: Bench) -> None:
    """Join offers to protect updates."""
    if not bench.joined.protects:
        raise CheckFailed("JoinRequest.protects is not set")


def protected(response: pb.NextTaskResponse) -> None:
    """Let a task require privacy."""
    if response.HasField("train"):
        response.train.privacy.CopyFrom(PRIVACY)


async def clips_updates(bench: Bench) -> None:
    """An update is clipped, and its report has only what it may have."""
    round_number = bench.next_round
    bench.faults.change_task(round_number, protected)
    receipt, update = await bench.update_of(round_number)
    check_protected_report(receipt.request)
    size = update.parameters.size
    # With the noise, whose norm is close to its expectation.
    longest = 1.01 * PRIVACY.clip * math.sqrt(1 + 1.1 * size * PRIVACY.noise_multiplier**2)
    length = float(np.linalg.norm(update.parameters.astype(np.float64)))
    if length > longest:
        raise CheckFailed(f"the norm of the update is {length:.4g}; expected at most {longest:.4g}")


async def adds_noise(bench: Bench) -> None:
    """The noise has the requested deviation."""
    round_number = bench.next_round
    for change in (protected, still):
        bench.faults.change_task(round_number, change)
    _, update = await bench.update_of(round_number)
    expected = PRIVACY.clip * PRIVACY.noise_multiplier
    values = update.parameters.astype(np.float64)
    tolerance = 0.03 + 4 / math.sqrt(2 * values.size)
    if abs(values.std() / expected - 1) > tolerance:
        raise CheckFailed(
            f"the standard deviation of the noise is {values.std():.4g}; expected {expected:.4g}"
        )


def check_protected_report(request: pb.OpenUploadRequest) -> None:
    """Raise CheckFailed if an announcement reveals more than the privacy allows."""
    if request.privacy != PRIVACY:
        raise CheckFailed("OpenUploadRequest.privacy differs from the task's; expected a copy")
    report = request.report
    revealed = [
        name
        for name, unprotected in (
            ("samples", report.samples != 1),
            ("steps", report.steps != 1),
            ("loss_before", not 0 <= report.loss_before <= PRIVACY.reports.loss_bound),
            ("loss_after", report.HasField("loss_after")),
            ("accuracy", report.HasField("accuracy")),
            ("seconds", bool(report.seconds)),
            ("planned_steps", bool(report.planned_steps)),
            ("batch_size", bool(report.batch_size)),
            ("cut_by", bool(report.cut_by)),
            ("loss_standard_error", report.HasField("loss_standard_error")),
        )
        if unprotected
    ]
    if revealed:
        raise CheckFailed(f"the report reveals {', '.join(revealed)}; see CLIENT.md, Private")
