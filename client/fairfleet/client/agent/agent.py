"""The client process: it requests a task, carries it out, sends the result, and starts again.

The model and the data stay loaded. The main thread trains and transfers. A second thread sends
heartbeats while the main thread trains.
"""

from __future__ import annotations

import logging
from pathlib import Path

from fairfleet.client.agent.call_errors import FederationChanged
from fairfleet.client.agent.counters import ClientCounters
from fairfleet.client.agent.fleet_session import Stopped
from fairfleet.client.agent.heartbeat import Heartbeat
from fairfleet.client.agent.introduction import join_request
from fairfleet.client.agent.local_state import LocalState
from fairfleet.client.agent.model_cache import ModelCache
from fairfleet.client.agent.model_keeper import ModelKeeper
from fairfleet.client.agent.pauses import pauses
from fairfleet.client.agent.result_reports import (
    log_evaluation,
    log_not_needed,
    log_quarantine,
    report_evaluation,
    report_verification,
)
from fairfleet.client.agent.server_connection import ServerConnection
from fairfleet.client.agent.task_data import DataMissing, TaskData
from fairfleet.client.agent.update_maker import UpdateMaker
from fairfleet.client.agent.uploader import FINAL, UnusableUpdate, UpdateUploader, can_be_sent
from fairfleet.client.device.availability import Availability
from fairfleet.client.device.certificate_renewal import Renewal
from fairfleet.client.privacy import Allowance, PrivacyBudgetSpent, ReleaseLedger
from fairfleet.client.task import Abandoned, Measuring, Progress, Task
from fairfleet.client.training.budget import Budget
from fairfleet.client.training.personal_model import PersonalModel
from fairfleet.client.training.step_trials import trial_losses
from fairfleet.client.update.spool import Spool
from fairfleet.common import wire
from fairfleet.common.errors import NotKept, StateDirError, TaskFailed, UsageError, WrongState
from fairfleet.common.features import software, unknown_to_client
from fairfleet.common.net.server_access import ServerAccess
from fairfleet.common.privacy import model_refusal
from fairfleet.proto.v1 import fleet_pb2 as pb

log = logging.getLogger(__name__)

FAILURES_IN_A_ROW = 3  # of the task; then it is broken, and a person must look at it
MAX_MESSAGE_CHARS = 300  # of a failure's text, as sent to the server


class Agent:
    """One client: a task, a connection to its server, and a folder for its state."""

    def __init__(
        self,
        name: str,
        task: Task,
        server: ServerAccess,
        folder: Path,
        budget: Budget | None = None,
        least_noise: float = 0.0,
        availability: Availability | None = None,
        send_error_text: bool = False,
        save_model: Path | None = None,
        error_feedback: bool = True,
        max_epsilon: float | None = None,
        delta: float = 1e-5,
        refresh_seconds: float = 30.0,
    ) -> None:
        """Prepare a client; nothing is sent before `run`.

        `least_noise` is the smallest noise multiplier with which this client does any work.
        `send_error_text` allows the text of a task's errors to be sent to the server. `save_model`
        is the file for models that this participant keeps. Without `error_feedback`, nothing is
        kept of what updates lost to their codec. `max_epsilon` and `delta` limit what is released
        of this client's data, over all federations. An idle client looks for new data every
        `refresh_seconds`. Raises UsageError if the folder, the file or the budget cannot be used.
        """
        self.task = task
        self.counters = ClientCounters(device=task.device)
        self._availability = availability or Availability()
        self._least_noise, self._send_error_text = least_noise, send_error_text
        self._failures = 0
        self._quarantined = b""  # digest of the update whose quarantine was logged last
        self._spool, self._personal = Spool(folder), PersonalModel(folder)
        self._allowance = Allowance(ReleaseLedger(folder), max_epsilon, delta)
        self._maker = UpdateMaker(
            task, budget or Budget(), self._spool, self._personal, self.counters, error_feedback
        )
        signature = task.initial_model().signature
        if (max_epsilon is not None or least_noise) and (why := model_refusal(signature)):
            raise UsageError(f"--max-epsilon and --least-noise cannot be kept: {why}")
        self._connection = ServerConnection(
            server, join_request(name, task, signature), self.counters
        )
        self._data = TaskData(task, self._connection, refresh_seconds)
        self._models = ModelCache(self._connection, signature)
        self._keeper = ModelKeeper(name, task, save_model, self._connection, self._models)
        self._uploader = UpdateUploader(
            self._connection, self._spool, self.counters, self._allowance, least_noise
        )
        self._local_state = LocalState(folder, (self._spool, self._personal))
        self._heartbeat = Heartbeat(self._connection)
        self._renewal = Renewal(server)

    def stop(self) -> None:
        """Make `run` leave the server and return. May be called from a signal handler."""
        self._connection.stop()

    def run(self) -> str:
        """Take part until the federation is finished, and return why this client ended."""
        reason, retires = "stopped", False
        between_federations = pauses()  # each makes a folder: one that changes all the time waits
        try:
            self._wait_until_available()
            self._data.refresh_if_due()
            while True:
                try:
                    reason = self._take_part()
                    return reason
                except FederationChanged as change:
                    log.warning("%s; this client goes on there", change)
                    self._connection.wait(next(between_federations))
        except Stopped:
            return reason
        except PrivacyBudgetSpent as error:
            log.warning("this client takes part no more: %s", error)
            reason, retires = "its privacy budget is spent, by its owner's limit", True
            return f"retired: {reason}"
        finally:
            (self._connection.retire if retires else self._connection.leave)(reason)
            self._local_state.leave()

    def _take_part(self) -> str:
        """Do the tasks of one federation until it is finished, and return why it is."""
        self._enter_federation()
        while True:
            self._renewal.renew_if_due()
            self._wait_until_available()
            self._require_allowance()
            self._data.refresh_if_due()
            self._data.stay_away_while_missing()
            response = self._models.next_task()
            if response.WhichOneof("task") == "finished":
                self._keeper.finished(response.finished)
                return response.finished.reason
            self._handle(response)

    def _enter_federation(self) -> None:
        """Join, use the folder of the federation, and send the update that is left in it."""
        self._local_state.enter(self._connection.enter(), self._pause_in_session)
        self._models.forget()
        self._keeper.explain_terms()
        self._uploader.send_unsent()

    def _pause_in_session(self, seconds: float) -> None:
        """Wait, but keep the lease: a process that was replaced learns of it from the server."""
        self._connection.wait(seconds)
        self._connection.heartbeat()

    # ---- tasks ---------------------------------------------------------------------------------

    def _handle(self, response: pb.NextTaskResponse) -> None:
        match response.WhichOneof("task"):
            case "train" | "verify" | "evaluate" if self._availability.blocked_reason:
                return  # The conditions changed during the poll, and this client leaves next.
            case "train" | "verify" | "evaluate" as kind if unknown := unknown_to_client(
                getattr(response, kind).required_features
            ):
                self._decline(response, unknown)
            case "train":
                self._log_quarantine(response.quarantined)
                self._require_noise(response.train.privacy)
                self._allowance.require_update(wire.privacy_in(response.train.privacy))
                self._attempt(response.train)
            case "verify":
                self._require_noise(self._connection.joined.privacy)
                self._verify(response.verify)
            case "evaluate":
                self._require_noise(response.evaluate.privacy)
                self._allowance.require_evaluation(wire.privacy_in(response.evaluate.privacy))
                self._evaluate(response.evaluate)
            case _:
                self._data.wait(response.wait.retry_after_seconds)

    def _decline(self, response: pb.NextTaskResponse, unknown: list[str]) -> None:
        """Refuse a task that requires features which this client does not have."""
        failure = (
            f"this client ({software()}) lacks {', '.join(unknown)}; install a newer fairfleet"
        )[:MAX_MESSAGE_CHARS]
        log.error("a task was declined: %s", failure)
        match response.WhichOneof("task"):
            case "verify":
                report_verification(self._connection, self._allowance, response.verify, [], failure)
            case "evaluate":
                version = response.evaluate.model.version
                self._connection.report_evaluation(version=version, failure=failure)
            case _:
                self._connection.heartbeat(task=response.train.id, failure=failure)

    def _log_quarantine(self, update: pb.QuarantinedUpdate) -> None:
        """Log once that an earlier update was left out of its round."""
        if update.reason and update.digest != self._quarantined:
            self._quarantined = update.digest
            log_quarantine(update)

    # ---- the owner's terms ---------------------------------------------------------------------

    def _wait_until_available(self) -> None:
        """Stay disconnected while the owner's conditions do not hold.

        The server then does not wait for this client.
        """
        if not (reason := self._availability.blocked_reason):
            return
        log.info("not now: %s", reason)
        self._connection.disconnect("not now")  # the reason itself is private
        while self._availability.blocked_reason:
            self._connection.wait(self._availability.every_seconds)
        log.info("taking part again")
        self._connection.reconnect()

    def _while_available(self, progress: Progress) -> Progress:
        """Return a progress function that also abandons the work when a condition fails."""

        def report_progress(done: int, planned: int, loss: float) -> None:
            progress(done, planned, loss)
            if self._availability.blocked_reason:
                raise Abandoned

        return report_progress

    def _require_noise(self, privacy: pb.Privacy) -> None:
        """Raise UsageError if the server requests less noise than the owner of the data allows."""
        noise_multiplier = wire.privacy_in(privacy).noise_multiplier
        if noise_multiplier < self._least_noise:
            raise UsageError(
                f"the server requests updates with a noise multiplier of {noise_multiplier:g}; "
                f"this client sends none with less than {self._least_noise:g}. The server's "
                "operator can set privacy.where: client; or give a smaller --least-noise here."
            )

    def _require_allowance(self) -> None:
        """Raise PrivacyBudgetSpent if no update that the server requests may leave any more."""
        self._allowance.require_update(wire.privacy_in(self._connection.joined.privacy))

    def _error_text(self, error: Exception) -> str:
        """Return what the server learns about a failure: the error's type.

        The text may quote the data, so it stays in this client's log. It is sent only if the owner
        of this machine allows it, and never with privacy.
        """
        private = self._least_noise > 0 or self._connection.joined.HasField("privacy")
        text = type(error).__name__
        if self._send_error_text and not private:
            text = f"{text}: {error}"
        return text[:MAX_MESSAGE_CHARS]

    # ---- training ------------------------------------------------------------------------------

    def _attempt(self, request: pb.TrainTask) -> None:
        """Train and upload. After a failure the round continues without this client."""
        about = {"round": request.round}
        try:
            self._train(request)
            self._failures = 0
        except (NotKept, WrongState) as error:
            log_not_needed(request.id, error, request.round)
        except UnusableUpdate as error:
            # The next round may succeed, and a person can read here why this one did not.
            log.error("%s is given up: %s", request.id, error, extra=about)
            self._spool.clear()
            self._connection.heartbeat(task=request.id, failure="its update is given up")
        except Abandoned:
            if self._connection.stopped:
                raise Stopped from None
            by_owner = self._availability.blocked_reason and "this client gave it up"
            reason = by_owner or "the round continued without it"
            log.info("%s was abandoned: %s", request.id, reason, extra=about)
        except DataMissing as error:
            log.info("%s is given up: %s", request.id, error, extra=about)
            self._connection.heartbeat(task=request.id, failure=str(error))
        except (Stopped, *FINAL):
            raise
        except Exception as error:  # the task is a user's code and may raise anything
            self._raise_if_stopped()
            self._record_failure(request, error)

    def _raise_if_stopped(self) -> None:
        """Raise Stopped after an error of the task while this client is stopped.

        A signal to all processes of a group ends those that read the task's data, too.
        """
        if self._connection.stopped:
            raise Stopped from None

    def _record_failure(self, request: pb.TrainTask, error: Exception) -> None:
        """Report a failed training.

        After several failures in a row, raises TaskFailed, or the StateDirError of the last one.
        """
        self._failures += 1
        self.counters.failures += 1
        log.error("%s failed", request.id, exc_info=error, extra={"round": request.round})
        self._spool.clear()
        self._connection.heartbeat(task=request.id, failure=self._error_text(error))
        if self._failures >= FAILURES_IN_A_ROW:
            if isinstance(error, StateDirError):
                raise error
            raise TaskFailed(
                f"the task failed {self._failures} times in a row, the last time with "
                f"{type(error).__name__}: {error}. Fix the task and restart the client."
            ) from error

    def _train(self, request: pb.TrainTask) -> None:
        self._local_state.renew_if_deleted(self._connection.joined, self._pause_in_session)
        federation = self._connection.joined.federation
        terms = wire.privacy_in(request.privacy)
        spooled = self._spool.find(federation, request.round, request.model.digest.hex())
        if spooled and can_be_sent(spooled, request, terms):
            # A second update would reveal more about the same data.
            self._uploader.upload(spooled, begun=True)
            return
        self._uploader.settle(federation, terms)
        self._models.fetch(request.model)
        if request.HasField("initial_model"):
            self._models.fetch_beside(request.initial_model)
        with self._heartbeat.during(request.id) as progress:
            self._data.refresh_for_training()
            progress = self._while_available(progress)
            spooled = self._maker.make(request, self._models, progress, federation)
        self._uploader.upload(spooled, begun=False)

    # ---- trying a step -------------------------------------------------------------------------

    def _verify(self, request: pb.VerifyTask) -> None:
        """Measure the losses after a step of several lengths, and report them."""
        about = {"round": request.model.version}
        losses, failure = list[float](), ""
        try:
            losses = self._trial_losses(request)
        except NotKept as error:
            log_not_needed(request.id, error, request.model.version)
            return
        except Abandoned:
            if self._connection.stopped:
                raise Stopped from None
            log.info("%s was abandoned: the step was taken without it", request.id, extra=about)
            return
        except (Stopped, *FINAL):
            raise
        except Exception as error:  # from a user's code, or from a step that cannot be decoded
            self._raise_if_stopped()
            log.exception("%s failed", request.id, extra=about)
            failure = self._error_text(error)
        report_verification(self._connection, self._allowance, request, losses, failure)

    def _trial_losses(self, request: pb.VerifyTask) -> list[float]:
        assert isinstance(self.task, Measuring), "only clients with such a task are selected"
        self._models.fetch(request.model)
        step = self._models.fetch_step(request.step)
        received, rounded = self._models.received, request.step.rounded
        with self._heartbeat.during(request.id) as progress:
            progress = self._while_available(progress)
            return list(
                trial_losses(self.task, received, step, request.halvings, progress, rounded)
            )

    # ---- evaluating ----------------------------------------------------------------------------

    def _evaluate(self, request: pb.EvaluateTask) -> None:
        """Evaluate a model on this client's test data, and report the result."""
        version = request.model.version
        try:
            self._models.fetch(request.model)
        except NotKept as error:
            log_not_needed(request.id, error, version)
            return
        try:
            with self._heartbeat.during(request.id):
                shared = self.task.evaluate(self._models.received.named())
                evaluation = self._personal.evaluate(self.task, shared)
        except Exception as error:  # the task is a user's code and may raise anything
            self._raise_if_stopped()
            log.exception("%s failed", request.id, extra={"round": version})
            self._connection.report_evaluation(version=version, failure=self._error_text(error))
            return
        self.counters.evaluation = evaluation
        report_evaluation(self._connection, self._allowance, request, evaluation)
        log_evaluation(version, evaluation)
        with self._heartbeat.during(request.id):  # a large file takes time
            self._keeper.evaluated()
