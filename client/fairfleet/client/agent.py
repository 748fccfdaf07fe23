"""The client process: asks for a task, does it, sends the result, asks again. Model and data stay loaded.

The main thread trains and transfers; while it trains, a second one sends heartbeats.
"""

from __future__ import annotations

import logging
import secrets
import time
from pathlib import Path
from typing import Any

from fairfleet.client.budget import Budget, Training
from fairfleet.client.heartbeat import Heartbeat
from fairfleet.client.held import DAMAGED_TRANSFERS, HeldModel
from fairfleet.client.link import Link, Stopped, pauses
from fairfleet.client.personal import Personal
from fairfleet.client.renewing import Renewal
from fairfleet.client.spool import Spool, Spooled
from fairfleet.client.task import Abandoned, Job, Measuring, Progress, Task
from fairfleet.client.telemetry import Telemetry
from fairfleet.client.trying import trial_losses
from fairfleet.client.willing import Willing
from fairfleet.common import wire
from fairfleet.common.access import Access
from fairfleet.common.codecs import ABILITIES
from fairfleet.common.errors import (
    BadRequest,
    ContestedIdentity,
    Corrupted,
    NotAllowed,
    NotKept,
    OutOfOrder,
    Refused,
    Superseded,
    TaskFailed,
    UsageError,
    WrongState,
)
from fairfleet.common.plain import word
from fairfleet.common.plan import Plan
from fairfleet.common.privacy import (
    SystemNoise,
    Terms,
    protect_update,
    protected_evaluation,
    protected_report,
    shortfall,
)
from fairfleet.proto.v1 import fleet_pb2 as pb

log = logging.getLogger(__name__)

FAILURES_IN_A_ROW = 3  # of the task: then it is broken, and a person must look
MOST_WORDS = 300  # about a failure, to the server

FINAL = (Superseded, ContestedIdentity, NotAllowed)


class Agent:
    def __init__(
        self,
        name: str,
        task: Task,
        server: Access,
        folder: Path,
        budget: Budget | None = None,
        least_noise: float = 0.0,
        willing: Willing | None = None,
    ) -> None:
        self.task = task
        self._willing = willing or Willing()
        self._least_noise = least_noise  # without it nothing is trained here
        self._budget = budget or Budget()
        self._largest_batch = self._budget.largest_batch(task)
        self.telemetry = Telemetry(device=task.device)
        self._spool = Spool(folder)
        self._personal = Personal(folder)
        own = task.initial_model().signature
        self._link = Link(
            server,
            pb.JoinRequest(
                client=name,
                instance=secrets.token_hex(8),
                protocol_version=wire.PROTOCOL_VERSION,
                codecs=list(ABILITIES),
                device=task.device,
                train_samples=task.train_samples,
                test_samples=task.test_samples,
                signature=wire.signature_out(own),
                verifies=isinstance(task, Measuring),
                protects=True,
                predicts=True,
            ),
            self.telemetry,
        )
        self._renewal = Renewal(server)
        self._heartbeat = Heartbeat(self._link)
        self._held = HeldModel(self._link, own)
        self._failures = 0

    def stop(self) -> None:
        """May be called from a signal handler: `run` then leaves politely and returns."""
        self._link.stop()

    def run(self) -> str:
        """Takes part until the federation is finished; says why it ended."""
        reason = "stopped"
        try:
            self._wait_until_willing()
            self._send_left()
            while True:
                self._renewal.attend()
                self._wait_until_willing()
                response = self._held.next_task()
                match response.WhichOneof("task"):
                    case "train" | "verify" | "evaluate" if self._willing.why_not:
                        continue  # it came to be so while the poll was held: the server is told that we go
                    case "train":
                        self._insist_on_noise(response.train.privacy)
                        self._attempt(response.train)
                    case "verify":
                        self._insist_on_noise(self._link.joined.privacy)
                        self._verify(response.verify)
                    case "evaluate":
                        self._insist_on_noise(response.evaluate.privacy)
                        self._evaluate(response.evaluate)
                    case "finished":
                        reason = response.finished.reason
                        return reason
                    case _:
                        self._link.wait(response.wait.retry_after_seconds)
        except Stopped:
            return reason
        finally:
            self._link.leave(reason)

    def _wait_until_willing(self) -> None:
        """While the owner's conditions are not met, this client is not there: the server need not wait for it."""
        if not (why := self._willing.why_not):
            return
        log.info("not now: %s", why)
        self._link.step_aside("not now")  # why is the owner's business
        while self._willing.why_not:
            self._link.wait(self._willing.every_seconds)
        log.info("taking part again")
        self._link.come_back()

    def _while_willing(self, progress: Progress) -> Progress:
        def told(done: int, planned: int, loss: float) -> None:
            progress(done, planned, loss)
            if self._willing.why_not:
                raise Abandoned

        return told

    def _insist_on_noise(self, asked: pb.Privacy) -> None:
        """Whose data are here decides: a server that asks for less than that is not given anything."""
        found = wire.privacy_in(asked).noise_multiplier
        if found < self._least_noise:
            raise UsageError(
                f"the server asks for updates with a noise multiplier of {found:g}, and this client gives none with "
                f"less than {self._least_noise:g}. Ask its operator for privacy.where: client, or give a smaller "
                "--least-noise."
            )

    def _words(self, error: Exception) -> str:
        """Why a task failed, for the server: an exception's text may quote the data, so with privacy only its kind."""
        private = self._least_noise > 0 or self._link.joined.HasField("privacy")
        return type(error).__name__ if private else f"{type(error).__name__}: {error}"[:MOST_WORDS]

    # ---- training ------------------------------------------------------------------------------

    def _attempt(self, asked: pb.TrainTask) -> None:
        """A task that fails is given up: the round goes on without us, and we ask for the next."""
        id = asked.id
        try:
            self._train(asked)
            self._failures = 0
        except (NotKept, WrongState) as error:
            log.info("%s is no longer wanted: %s", id, error, extra={"round": asked.round})
        except Abandoned:
            if self._link.stopped:
                raise Stopped from None
            ours = self._willing.why_not and "this client gave it up"
            log.info("%s was abandoned: %s", id, ours or "the round went on without it", extra={"round": asked.round})
        except (Stopped, *FINAL):
            raise
        except Exception as error:  # the task is a stranger's code: whatever it raises is its failure
            self._failures += 1
            self.telemetry.failures += 1
            log.exception("%s failed", id, extra={"round": asked.round})
            self._spool.clear()
            self._link.heartbeat(task=id, failure=self._words(error))
            if self._failures >= FAILURES_IN_A_ROW:
                raise TaskFailed(
                    f"the task failed {self._failures} times in a row, the last time with "
                    f"{type(error).__name__}: {error}. Mend it and start this client again."
                ) from error

    def _train(self, asked: pb.TrainTask) -> None:
        federation, digest = self._link.joined.federation, asked.model.digest.hex()
        terms, spooled = wire.privacy_in(asked.privacy), self._spool.find(federation, asked.round, digest)
        held = {"", asked.prediction.base.hex()}  # else the server can no longer read it
        if spooled and spooled.base in held and not shortfall(spooled.terms, terms):
            # another one would tell more of the same data
            self._upload(spooled, begun=True)
            return
        self._settle(federation, terms)
        self._held.fetch(asked.model)
        with self._heartbeat.during(asked.id) as progress:
            spooled = self._make_update(asked, self._while_willing(progress), federation)
        self._upload(spooled, begun=False)

    def _make_update(self, asked: pb.TrainTask, progress: Progress, federation: str) -> Spooled:
        began = time.perf_counter()
        plan, received, terms = wire.plan_in(asked.plan), self._held.received, wire.privacy_in(asked.privacy)
        progress = _silent(progress) if terms.reports else progress
        if plan.personal_lambda:
            own = self._within_budget(plan, share=0.5)
            self._personal.train(self.task, received, own.plan, progress, own.enough)
        training = self._within_budget(plan, share=0.5 if plan.personal_lambda else 1.0)
        job = Job(training.plan, asked.report_gradient_norm, progress, enough=training.enough)
        trained = self.task.train(received.named(), job)
        self._held.trained.assign(trained.arrays)
        report = training.told(trained.report).model_copy(update={"seconds": time.perf_counter() - began})
        self.telemetry.trained(report)
        if report.cut_by:
            done = f"{report.steps} of {report.planned_steps} steps"
            log.info("%s: %s, cut by %s", asked.id, done, report.cut_by, extra={"round": asked.round})
        if terms.reports:
            report = protected_report(report, plan, terms.reports, SystemNoise())
        protect_update(received, self._held.trained, terms, SystemNoise())
        return self._spool.write(
            received,
            self._held.trained,
            report,
            terms=terms,
            federation=federation,
            round=asked.round,
            model_digest=asked.model.digest.hex(),
            codec=asked.codec,
            seed=plan.seed,
            error_feedback=asked.error_feedback,
            prediction=asked.prediction.base if asked.HasField("prediction") else None,
        )

    def _within_budget(self, plan: Plan, share: float) -> Training:
        """With this share of the time: a personal model is trained beside the federation's."""
        seconds = self._budget.seconds
        budget = self._budget.model_copy(update={"seconds": seconds and share * seconds})
        return Training(plan, self.task.train_samples, budget, self._largest_batch)

    def _upload(self, spooled: Spooled, *, begun: bool) -> None:
        """`begun`: the server may have a part of it."""
        receipt = self._deliver(spooled, begun=begun)
        self._spool.settle(spooled, counted=_counts(receipt, spooled), for_good=receipt.durable)

    def _deliver(self, spooled: Spooled, *, begun: bool) -> pb.Receipt:
        """Sends what the server has not got yet, however often the link breaks, until there is a receipt."""
        damaged = 0
        for pause in pauses():
            try:
                receipt = self._send_rest(spooled) if begun else self._send_whole(spooled)
            except (Corrupted, OutOfOrder):
                damaged += 1
                if damaged == DAMAGED_TRANSFERS:
                    raise
                receipt = None
            if receipt is not None:
                self.telemetry.updates[word(pb.Outcome.DESCRIPTOR, receipt.outcome)] += 1
                if receipt.outcome != pb.OUTCOME_COUNTED:
                    about = {"round": spooled.round}
                    log.info("the update for round %d does not count: %s", spooled.round, receipt.reason, extra=about)
                return receipt
            begun = True
            self._link.wait(pause)
        raise AssertionError("pauses never end")  # pragma: no cover

    def _send_whole(self, spooled: Spooled) -> pb.Receipt | None:
        return self._link.open_and_send(self._spool.messages_from(0), **_announced(spooled))

    def _send_rest(self, spooled: Spooled) -> pb.Receipt | None:
        opened = self._link.open_upload(**_announced(spooled))
        if opened.HasField("receipt"):
            return opened.receipt
        return self._link.send(opened.upload, self._spool.messages_from(opened.offset_bytes))

    def _send_left(self) -> None:
        """An earlier run of this client may have left an update: if its round is over, the history may want it."""
        federation = self._link.federation()
        spooled = self._spool.left(federation)
        if spooled and not self._may_not_go(spooled, wire.privacy_in(self._link.joined.privacy)):
            try:
                self._upload(spooled, begun=True)
            except FINAL:
                raise
            except Refused as error:
                self._not_wanted(spooled, error)

    def _may_not_go(self, spooled: Spooled, terms: Terms) -> bool:
        """Its report would go along with the announcement: so it is not even announced to who asks for more by now."""
        return spooled.terms.noise_multiplier < self._least_noise or shortfall(spooled.terms, terms) is not None

    def _settle(self, federation: str, terms: Terms) -> None:
        """Before another update takes its place: what became of one whose receipt never came, or was not for good?"""
        spooled = self._spool.unsettled(federation)
        if spooled is None:
            return
        if self._may_not_go(spooled, terms):
            self._spool.settle(spooled, counted=False)
            return
        try:
            opened = self._link.open_upload(**_announced(spooled))
            receipt = opened.receipt  # an empty one says that it may be sent
            if not opened.HasField("receipt") and self._spool.left(federation):
                receipt = self._deliver(spooled, begun=True)
            self._spool.settle(spooled, counted=_counts(receipt, spooled))
        except FINAL:
            raise
        except Refused as error:
            self._not_wanted(spooled, error)

    def _not_wanted(self, spooled: Spooled, error: Refused) -> None:
        log.info("the update for round %d did not count: %s", spooled.round, error, extra={"round": spooled.round})
        self._spool.settle(spooled, counted=False)

    # ---- trying a step -------------------------------------------------------------------------

    def _verify(self, asked: pb.VerifyTask) -> None:
        about = {"round": asked.model.version}
        losses, failure = list[float](), ""
        try:
            assert isinstance(self.task, Measuring), "only such are asked"
            self._held.fetch(asked.model)
            step = self._held.fetch_step(asked.step)
            with self._heartbeat.during(asked.id) as progress:
                received, rounded = self._held.received, asked.step.rounded
                steady = self._while_willing(progress)
                losses += trial_losses(self.task, received, step, asked.halvings, steady, rounded)
        except NotKept as error:
            log.info("%s is no longer wanted: %s", asked.id, error, extra=about)
            return
        except Abandoned:
            if self._link.stopped:
                raise Stopped from None
            log.info("%s was abandoned: the step was taken without it", asked.id, extra=about)
            return
        except (Stopped, *FINAL):
            raise
        except Exception as error:  # a stranger's code, or a step that cannot be decoded: this round goes on without us
            log.exception("%s failed", asked.id, extra=about)
            losses, failure = [], self._words(error)
        told = {**about, "step_digest": asked.step.digest, "failure": failure}
        try:
            self._link.report_verification(losses=losses, **told)
        except BadRequest as error:  # the server was restarted, and tries other lengths now: it will ask again
            log.info("%s is no longer wanted: %s", asked.id, error, extra=about)

    # ---- evaluating ----------------------------------------------------------------------------

    def _evaluate(self, asked: pb.EvaluateTask) -> None:
        version = asked.model.version
        try:
            self._held.fetch(asked.model)
        except NotKept as error:
            log.info("%s is no longer wanted: %s", asked.id, error, extra={"round": version})
            return
        try:
            with self._heartbeat.during(asked.id):
                evaluation = self._personal.evaluate(self.task, self.task.evaluate(self._held.received.named()))
        except Exception as error:  # a stranger's code
            log.exception("%s failed", asked.id, extra={"round": version})
            self._link.report_evaluation(version=version, failure=self._words(error))
            return
        self.telemetry.evaluation = evaluation
        if reports := wire.privacy_in(asked.privacy).reports:
            evaluation = protected_evaluation(evaluation, reports, SystemNoise())
        try:
            told = wire.evaluation_out(evaluation)
            self._link.report_evaluation(version=version, evaluation=told, privacy=asked.privacy)
        except WrongState as error:  # the server asks for more noise by now
            log.info("%s is no longer wanted: %s", asked.id, error, extra={"round": version})


def _silent(progress: Progress) -> Progress:
    """For heartbeats that tell only that there is life: a loss, or a number of steps, is a word about the data."""
    return lambda done, planned, loss: progress(0, 0, 0.0)


def _announced(spooled: Spooled) -> dict[str, Any]:
    """What an OpenUploadRequest says of it."""
    return {
        "round": spooled.round,
        "model_digest": bytes.fromhex(spooled.model_digest),
        "codec": spooled.codec,
        "size_bytes": spooled.size_bytes,
        "digest": bytes.fromhex(spooled.digest),
        "report": wire.report_out(spooled.report),
        "privacy": wire.privacy_out(spooled.terms),
        "base": bytes.fromhex(spooled.base),
    }


def _counts(receipt: pb.Receipt, spooled: Spooled) -> bool:
    """Of this very update: another one that this client made for the round may be the one that counts."""
    return receipt.outcome == pb.OUTCOME_COUNTED and receipt.digest.hex() == spooled.digest
