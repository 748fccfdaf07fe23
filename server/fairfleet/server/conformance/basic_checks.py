"""The checks of the level basic: the calls that every client makes, with every kind of failure.

Each check gets the bench and raises CheckFailed with what it found and what it expected.
"""

from __future__ import annotations

import numpy as np

from fairfleet.common import wire
from fairfleet.proto.v1 import fleet_pb2 as pb
from fairfleet.server.conformance.bench import Bench
from fairfleet.server.conformance.faults import Fault
from fairfleet.server.conformance.faulty_service import PAUSE_SECONDS
from fairfleet.server.conformance.observed_calls import CheckFailed, ObservedCall

ENDLESS_STEPS = 100_000_000  # of a training that ends only because it is abandoned
QUIET_SECONDS = 3.0  # without a Join after ABORTED: a client that joins again does so at once
CLOCK_SECONDS = 0.05  # tolerance for pauses


class NotApplicable(Exception):
    """The check does not concern this client."""


async def joins(bench: Bench) -> None:
    """Join names what a server needs to know."""
    request = bench.joined
    if "raw32" not in request.codecs:
        raise CheckFailed(f"codecs are {list(request.codecs)}; expected raw32 among them")
    if request.since:
        raise CheckFailed(f"since is {request.since} in the first Join; expected 0")


async def trains(bench: Bench) -> None:
    """An update with a complete report."""
    receipt, update = await bench.update_of()
    await _check_report_of(bench, receipt)
    if not np.any(update.parameters):
        raise CheckFailed("the update has only zeros; expected the result of a training")


async def joins_a_single_sample(bench: Bench) -> None:
    """A single last sample joins the batch before it."""
    samples = bench.joined.train_samples
    if samples < 3:
        raise NotApplicable("the client has fewer than three training samples")

    def leaves_one(response: pb.NextTaskResponse) -> None:
        if response.HasField("train"):
            response.train.plan.batch_size = samples - 1

    round_number = bench.next_round
    bench.faults.change_task(round_number, leaves_one)
    receipt, _ = await bench.update_of(round_number)
    await _check_report_of(bench, receipt)


async def _check_report_of(bench: Bench, receipt: ObservedCall) -> None:
    round_number = receipt.request.round
    task = await bench.log.next(
        "Task", 0, "a task of this round", lambda call: is_training(call, round_number)
    )
    check_report(bench, receipt.request.report, task.response.train)


def is_training(call: ObservedCall, round_number: int) -> bool:
    """Return whether a client got the training of this round."""
    response: pb.NextTaskResponse = call.response
    return response.HasField("train") and response.train.round == round_number


def check_report(bench: Bench, report: pb.TrainReport, task: pb.TrainTask) -> None:
    """Raise CheckFailed for a report that does not fit the plan."""
    samples = bench.joined.train_samples
    planned = wire.plan_in(task.plan).steps_for(samples)
    if report.samples != samples:
        raise CheckFailed(f"report.samples is {report.samples}; Join said {samples}")
    if report.steps != planned and not report.cut_by:
        raise CheckFailed(
            f"report.steps is {report.steps}; the plan has {planned} for {samples} samples in "
            f"batches of {task.plan.batch_size}, or cut_by names the limit"
        )
    if report.learning_rate != task.plan.learning_rate:
        raise CheckFailed(
            f"report.learning_rate is {report.learning_rate}; the plan has "
            f"{task.plan.learning_rate}"
        )
    wants_after = task.plan.loss_after != pb.LOSS_MEASUREMENT_NONE
    if wants_after and not report.HasField("loss_after"):
        raise CheckFailed("report.loss_after is missing; the plan asks for it")


async def evaluates(bench: Bench) -> None:
    """A client with test data reports evaluations."""
    if not bench.joined.test_samples:
        raise NotApplicable("the client has no test samples")
    report = await bench.log.next("ReportEvaluation", 0, "an evaluation")
    if report.request.failure:
        raise CheckFailed(f"the evaluation failed: {report.request.failure}")


async def continues_a_cut_download(bench: Bench) -> None:
    """A download that breaks off is continued."""
    position = bench.log.position
    bench.faults.arm("FetchModel", Fault.CUT)
    first = await bench.log.next("FetchModel", position, "a download of a new model")
    await _fetches_again(bench, first)


async def repeats_a_damaged_download(bench: Bench) -> None:
    """A chunk that does not match its checksum is fetched again."""
    position = bench.log.position
    bench.faults.arm("FetchModel", Fault.DAMAGE)
    first = await bench.log.next("FetchModel", position, "a download of a new model")
    await _fetches_again(bench, first)


async def _fetches_again(bench: Bench, first: ObservedCall) -> None:
    version = first.request.version

    def concerns_version(call: ObservedCall) -> bool:
        return bool(call.request.round == version)

    again = await bench.log.next(
        "FetchModel",
        first.number + 1,
        f"the rest of version {version}",
        lambda call: call.request.version == version,
        forbidden=["SendUpload"],
        is_forbidden=concerns_version,
    )
    await bench.log.next("Fetched", again.number, f"all of version {version}")
    await bench.log.next("Receipt", again.number, "an update after the download")


async def continues_a_cut_upload(bench: Bench) -> None:
    """An upload that breaks off is continued with the same update."""
    await _sends_again(bench, Fault.CUT)


async def repeats_a_damaged_upload(bench: Bench) -> None:
    """After DATA_LOSS the same update is sent again."""
    await _sends_again(bench, Fault.DAMAGE)


async def _sends_again(bench: Bench, fault: Fault) -> None:
    position = bench.log.position
    bench.faults.arm("SendUpload", fault)
    first = await bench.log.next("SendUpload", position, "an upload")
    await _opens_again(bench, first)


async def _opens_again(bench: Bench, first: ObservedCall) -> None:
    opened = await bench.log.next(
        "OpenUpload", first.number + 1, "OpenUpload after the upload failed"
    )
    if (opened.request.round, opened.request.digest) != (first.request.round, first.request.digest):
        raise CheckFailed("another update was announced; expected the same round and digest")
    receipt = await bench.log.next("Receipt", opened.number, "the receipt of the same update")
    if receipt.response.outcome != pb.OUTCOME_COUNTED:
        raise CheckFailed(f"the update does not count: {receipt.response.reason}")


async def keeps_requested_pauses(bench: Bench) -> None:
    """`fairfleet-retry-seconds` is kept."""
    position = bench.log.position
    bench.faults.arm("NextTask", Fault.PAUSE)
    refused = await bench.log.next("NextTask", position, "a poll")
    again = await bench.log.next("NextTask", refused.number + 1, "a second poll after the pause")
    pause = again.at - refused.at
    if pause < PAUSE_SECONDS - CLOCK_SECONDS:
        raise CheckFailed(f"the call came again after {pause:.2f} s; expected {PAUSE_SECONDS:g} s")


async def joins_again(bench: Bench) -> None:
    """After UNAUTHENTICATED the client joins again and goes on."""
    position = bench.log.position
    bench.faults.arm("NextTask", Fault.FORGET)
    await _joins_as_before(bench, position)
    await bench.log.next("Receipt", bench.log.newest("Join").number, "an update in the new session")


async def survives_a_restart(bench: Bench) -> None:
    """A restart of the server during an upload loses nothing."""
    position = bench.log.position
    bench.faults.arm("SendUpload", Fault.RESTART)
    first = await bench.log.next("SendUpload", position, "an upload")
    restarted = await bench.log.next("Restarted", position, "the restart of this server")
    await _joins_as_before(bench, restarted.number)
    await _opens_again(bench, first)


async def _joins_as_before(bench: Bench, position: int) -> None:
    """Wait for a Join, and compare it with the first Join of the client's process."""
    first = next(call for call in bench.log.calls if call.name == "Join")
    again = await bench.log.next("Join", position, "a second Join")
    if again.request.instance != first.request.instance:
        raise CheckFailed("instance changed; expected the same in every Join of a process")
    if again.request.since != first.response.fence:
        raise CheckFailed(
            f"since is {again.request.since}; expected {first.response.fence}, the fence of the "
            "first answer"
        )


async def abandons_a_task(bench: Bench) -> None:
    """Heartbeats are sent, and a task is abandoned."""
    round_number = bench.next_round
    bench.faults.change_task(round_number, _endless)
    task = await bench.log.next(
        "Task",
        0,
        "a task",
        lambda call: is_training(call, round_number),
    )
    task_id = task.response.train.id
    bench.faults.abandoned = task_id
    heartbeat = await bench.log.next(
        "Heartbeat",
        task.number,
        f"a heartbeat for {task_id} during {ENDLESS_STEPS} steps",
        lambda call: call.request.task == task_id,
    )
    bench.faults.disarm()  # the same task comes again, with the usual plan
    if heartbeat.request.failure:
        raise CheckFailed(f"the client gave the task up: {heartbeat.request.failure}")
    await bench.log.next(
        "NextTask", heartbeat.number, "a poll after abandon", forbidden=["SendUpload"]
    )
    await bench.log.next("Receipt", heartbeat.number, "an update after the abandoned task")


def _endless(response: pb.NextTaskResponse) -> None:
    if response.HasField("train"):
        response.train.plan.epochs, response.train.plan.steps = 0, ENDLESS_STEPS


async def stops_after_aborted(bench: Bench) -> None:
    """A client that another process replaced stops."""
    position = bench.log.position
    await bench.take_over()
    aborted = await bench.log.next("Aborted", position, "a call that is answered with ABORTED")
    await bench.log.quiet("JoinAttempt", aborted.number, QUIET_SECONDS, "no Join after ABORTED")
