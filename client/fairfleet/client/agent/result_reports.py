"""Reports of evaluations and of tried steps, each charged to the ledger before it is sent."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from fairfleet.client.agent.introduction import federation_key
from fairfleet.client.agent.server_connection import ServerConnection
from fairfleet.client.privacy import Allowance
from fairfleet.common import wire
from fairfleet.common.cli.event_text import figure
from fairfleet.common.cli.log_format import EVENTS
from fairfleet.common.errors import BadRequest, UsageError, WrongState
from fairfleet.common.features import MEASURES
from fairfleet.common.names import round_name
from fairfleet.common.privacy import PrivacyTerms, SystemNoise, protected_evaluation
from fairfleet.common.reports import Evaluation
from fairfleet.proto.v1 import fleet_pb2 as pb

log = logging.getLogger(__name__)
events = logging.getLogger(EVENTS)


def report_verification(
    connection: ServerConnection,
    allowance: Allowance,
    request: pb.VerifyTask,
    losses: Sequence[float],
    failure: str,
) -> None:
    """Send the losses that were measured for a proposed step, or why there are none."""
    if losses:
        allowance.charge_trial(federation_key(connection.joined), request.model.version)
    try:
        connection.report_verification(
            round=request.model.version,
            step_digest=request.step.digest,
            losses=losses,
            failure=failure,
        )
    except (BadRequest, WrongState) as error:
        # The server was restarted with other settings. It will select this client again.
        log_not_needed(request.id, error, request.model.version)


def report_evaluation(
    connection: ServerConnection,
    allowance: Allowance,
    request: pb.EvaluateTask,
    evaluation: Evaluation,
) -> None:
    """Send an evaluation with the noise that the task requests."""
    version, terms = request.model.version, wire.privacy_in(request.privacy)
    try:
        if MEASURES not in connection.joined.features:
            _check_has_loss(evaluation)
        protected = _protected(evaluation, terms)
        federation = federation_key(connection.joined)
        allowance.charge_evaluation(federation, version, protected, terms)
        connection.report_evaluation(
            version=version, evaluation=wire.evaluation_out(protected), privacy=request.privacy
        )
    except WrongState as error:  # the server now requires more noise
        log_not_needed(request.id, error, version)
    except (BadRequest, UsageError) as error:
        # The federation goes on without it, and a person can read here why.
        log.error("%s cannot be reported: %s", request.id, error, extra={"round": version})
        failure = "the evaluation cannot be reported; the client's log says why"
        connection.report_evaluation(version=version, failure=failure)


def _check_has_loss(evaluation: Evaluation) -> None:
    """Raise UsageError for an evaluation that a server without named measures misunderstands."""
    if evaluation.loss is None:
        raise UsageError(
            "it has no loss, and this server is too old for evaluations without one: it would "
            "take the loss for 0. Upgrade the server, or let Task.evaluate return a loss too."
        )


def _protected(evaluation: Evaluation, terms: PrivacyTerms) -> Evaluation:
    if terms.reports is None:
        return evaluation
    if evaluation.measures:
        names = ", ".join(evaluation.measures)
        log.info("not reported, because noise protects only loss and accuracy: %s", names)
    return protected_evaluation(evaluation, terms.reports, SystemNoise())


def log_not_needed(task_id: str, error: Exception, round_number: int) -> None:
    """Log that a task's result is no longer needed."""
    log.info("%s is no longer needed: %s", task_id, error, extra={"round": round_number})


def log_quarantine(update: pb.QuarantinedUpdate) -> None:
    """Log that an earlier update was left out of its round."""
    log.warning(
        "%s continued without this client's update: %s",
        round_name(update.round),
        update.reason,
        extra={"round": update.round},
    )


def log_evaluation(version: int, evaluation: Evaluation) -> None:
    """Log what a model achieves on this client's test data."""
    figures = evaluation.figures()
    values = ", ".join(f"{name} {figure(name, row.value)}" for name, row in figures.items())
    about = {"event": "evaluated", "round": version}
    events.info("version %d on this client's test data: %s", version, values, extra=about)
