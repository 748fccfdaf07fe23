"""From a training request to an encoded update on disk.

The task trains within this machine's budget, the report is checked and completed, the requested
privacy is applied, and the result is written to the spool. Nothing is sent here.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable

from fairfleet.client.agent.counters import ClientCounters
from fairfleet.client.agent.model_cache import ModelCache
from fairfleet.client.agent.uploader import UnusableUpdate
from fairfleet.client.task import Job, Measuring, Progress, Task
from fairfleet.client.training.budget import Budget, Training
from fairfleet.client.training.personal_model import PersonalModel
from fairfleet.client.update.federation_folder import unusable
from fairfleet.client.update.spool import Spool, SpooledUpdate
from fairfleet.common import wire
from fairfleet.common.errors import TaskFailed
from fairfleet.common.privacy import PrivacyTerms, SystemNoise, protect_update, protected_report
from fairfleet.common.reports import TrainReport
from fairfleet.common.training_plan import Plan
from fairfleet.proto.v1 import fleet_pb2 as pb

log = logging.getLogger(__name__)


class UpdateMaker:
    """Trains one task within one budget and spools its updates."""

    def __init__(
        self,
        task: Task,
        budget: Budget,
        spool: Spool,
        personal: PersonalModel,
        counters: ClientCounters,
        error_feedback: bool = True,
    ) -> None:
        """Check that the task can keep to the budget; raises UsageError if it cannot.

        Without `error_feedback` there is none, also where the server wants it.
        """
        self._error_feedback = error_feedback
        self._task, self._budget, self._spool, self._personal = task, budget, spool, personal
        self._counters = counters
        # Without data, the memory that a batch takes cannot be measured yet.
        self._fits = bool(task.train_samples)
        self._largest_batch = budget.largest_batch(task) if self._fits else None

    def make(
        self, request: pb.TrainTask, models: ModelCache, progress: Progress, federation: str
    ) -> SpooledUpdate:
        """Train the received model as requested, and return the spooled update.

        Raises UnusableUpdate if the report lacks a field that the federation needs.
        """
        if not self._fits:
            self._largest_batch, self._fits = self._budget.largest_batch(self._task), True
        plan, terms = wire.plan_in(request.plan), wire.privacy_in(request.privacy)
        progress = _silent(progress) if terms.reports else progress
        initial_loss = self._initial_loss(request, models)
        report = self._train(request, plan, models, progress)
        report = report.model_copy(update={"initial_loss": initial_loss})
        check_report_fields(report, request.report_fields)
        self._counters.record_training(report)
        _log_cuts(request, report)
        if terms.reports:
            wanted = wire.loss_plan_in(request.plan)
            report = protected_report(report, plan, terms.reports, SystemNoise(), wanted)
        protect_update(models.received, models.trained, terms, SystemNoise())
        return self._write(request, models, report, terms, plan.seed, federation)

    def _initial_loss(self, request: pb.TrainTask, models: ModelCache) -> float | None:
        """Return the loss on the initial model, which was fetched into the trained one's memory.

        Return None if the server does not ask for it.
        """
        if not request.HasField("initial_model"):
            return None
        if not isinstance(self._task, Measuring):
            raise TaskFailed(
                "the server asks for the training loss of the initial model, and the task has no "
                "method training_loss. Add the method, or choose a rule that does not need it."
            )
        loss = float(self._task.training_loss(models.trained.named()))
        if not math.isfinite(loss):
            raise TaskFailed(f"the training loss of the initial model is {loss}, not finite")
        return loss

    def _train(
        self, request: pb.TrainTask, plan: Plan, models: ModelCache, progress: Progress
    ) -> TrainReport:
        """Train the personal model, if there is one, and the federation's; return the report."""
        began = time.perf_counter()
        received = models.received
        if plan.personal_lambda:
            own = self._within_budget(plan, share=0.5)
            self._personal.train(self._task, received, own.plan, progress, own.enough)
        training = self._within_budget(plan, share=0.5 if plan.personal_lambda else 1.0)
        job = Job(
            training.plan,
            request.report_gradient_norm,
            progress,
            enough=training.enough,
            losses=wire.loss_plan_in(request.plan),
        )
        trained = self._task.train(received.named(), job)
        models.trained.assign(trained.arrays)
        report = training.complete_report(trained.report)
        return report.model_copy(update={"seconds": time.perf_counter() - began})

    def _within_budget(self, plan: Plan, share: float) -> Training:
        """Start a training with this share of the time.

        A personal model and the federation's model have half of the time each.
        """
        seconds = self._budget.seconds
        budget = self._budget.model_copy(update={"seconds": seconds and share * seconds})
        return Training(plan, self._task.train_samples, budget, self._largest_batch)

    def _write(
        self,
        request: pb.TrainTask,
        models: ModelCache,
        report: TrainReport,
        terms: PrivacyTerms,
        seed: int,
        federation: str,
    ) -> SpooledUpdate:
        try:
            return self._spool.write(
                models.received,
                models.trained,
                report,
                terms=terms,
                federation=federation,
                round_number=request.round,
                model_digest=request.model.digest.hex(),
                codec=request.codec,
                seed=seed,
                error_feedback=request.error_feedback and self._error_feedback,
                prediction=request.prediction.base if request.HasField("prediction") else None,
            )
        except OSError as error:
            raise unusable(self._spool.folder, error) from error


def check_report_fields(report: TrainReport, required: Iterable[str]) -> None:
    """Raise UnusableUpdate if the report lacks a field that the federation's rule needs.

    This happens before anything is sent.
    """
    if missing := [name for name in required if getattr(report, name, None) is None]:
        raise UnusableUpdate(
            f"the task's report has no {', '.join(missing)}, which this federation's rule needs "
            "from every client. Return it in the TrainReport of Task.train "
            "(Job.want_gradient_norm requests the gradient norm)."
        )


def _silent(progress: Progress) -> Progress:
    """Return a progress function for heartbeats that only show that the client is alive.

    A loss, or a number of steps, reveals something about the data.
    """
    return lambda done, planned, loss: progress(0, 0, 0.0)


def _log_cuts(request: pb.TrainTask, report: TrainReport) -> None:
    if report.cut_by:
        log.info(
            "%s: %d of %d steps, cut by %s",
            request.id,
            report.steps,
            report.planned_steps,
            report.cut_by,
            extra={"round": request.round},
        )
