"""The messages of the tasks that clients get: train, verify a step, evaluate."""

from __future__ import annotations

import asyncio

from fairfleet.common import wire
from fairfleet.common.codecs import is_predicted, needs, uses_error_feedback
from fairfleet.common.errors import TryLater
from fairfleet.proto.v1 import fleet_pb2 as pb
from fairfleet.server.federation.clients.assignments import Assignment
from fairfleet.server.federation.clients.sessions import ClientDescription
from fairfleet.server.federation.coordinator import Coordinator
from fairfleet.server.transfer.codec_selection import Uplinks
from fairfleet.server.transfer.published_model import PublishedModel


class TaskMessages:
    """Builds the message of an assignment from the federation's present state."""

    def __init__(
        self, coordinator: Coordinator, uplinks: Uplinks, privacy: pb.Privacy | None
    ) -> None:
        """`uplinks` are the measured ones; `privacy` is what clients have to apply."""
        self._coordinator, self._uplinks, self._privacy = coordinator, uplinks, privacy

    def task(self, member: ClientDescription, assignment: Assignment) -> pb.NextTaskResponse:
        """Return the task of a client; raise TryLater if it ended just now."""
        model = self.model(member, self._coordinator.state.publication)
        seconds_left = max(0.0, assignment.ends - asyncio.get_running_loop().time())
        if assignment.kind == "evaluate":
            evaluate = pb.EvaluateTask(
                id=assignment.id,
                model=model,
                seconds_left=seconds_left,
                privacy=self._privacy,
                required_features=self._required_features(assignment),
            )
            return pb.NextTaskResponse(evaluate=evaluate)
        if assignment.kind == "verify":
            return pb.NextTaskResponse(verify=self._verify_task(assignment, model, seconds_left))
        train = self._train_task(member, assignment, model, seconds_left)
        return pb.NextTaskResponse(train=train)

    def _train_task(
        self,
        member: ClientDescription,
        assignment: Assignment,
        model: pb.ModelRef,
        seconds_left: float,
    ) -> pb.TrainTask:
        coordinator, round_number = self._coordinator, assignment.version
        codec = coordinator.codecs.name_codec(
            member.client, round_number, member.codecs, self._uplinks.of(member.client)
        )
        fields = coordinator.report_requirements.fields
        initial = self._initial_model(member, round_number)
        if initial is not None:
            fields = (*fields, "initial_loss")
        return pb.TrainTask(
            id=assignment.id,
            round=round_number,
            model=model,
            plan=wire.plan_out(
                coordinator.plan.for_client(member.client, round_number), coordinator.loss_plan
            ),
            codec=codec,
            seconds_left=seconds_left,
            report_gradient_norm="gradient_norm" in fields,
            report_fields=fields,
            error_feedback=uses_error_feedback(
                coordinator.settings.compression.error_feedback, codec
            ),
            prediction=self._prediction(member, codec),
            privacy=self._privacy,
            required_features=self._required_features(assignment),
            initial_model=initial,
        )

    def _initial_model(self, member: ClientDescription, round_number: int) -> pb.ModelRef | None:
        """Return version 0 if the client should measure its loss on it, once; else None."""
        initial = self._coordinator.state.initial_model
        committer = self._coordinator.runner.committer
        if initial is None or not member.measures_initial_loss:
            return None
        if not committer.lacks_initial_loss(member.client, round_number):
            return None
        return pb.ModelRef(version=0, digest=initial.digest, size_bytes=initial.size_bytes)

    def _required_features(self, assignment: Assignment) -> list[str]:
        return sorted(self._coordinator.runner.requirements.of(assignment.kind))

    def _prediction(self, member: ClientDescription, codec: str) -> pb.Prediction | None:
        bases = self._coordinator.clients.prediction_bases
        if bases is None or not (member.predicts and is_predicted(codec)):
            return None
        return pb.Prediction(base=bases.digest_of(member.client))

    def _verify_task(
        self, assignment: Assignment, model: pb.ModelRef, seconds_left: float
    ) -> pb.VerifyTask:
        proposal = self._coordinator.state.proposal
        if proposal is None:
            raise TryLater("the step was decided just now; request the task again")
        return pb.VerifyTask(
            id=assignment.id,
            model=model,
            step=self._change(proposal.publication),
            halvings=proposal.trials.halvings,
            seconds_left=seconds_left,
            required_features=self._required_features(assignment),
        )

    def model(self, member: ClientDescription, publication: PublishedModel) -> pb.ModelRef:
        """Return a published model, in all forms that the client can decode.

        Changes lead to the newest version only.
        """
        is_newest = publication.version == self._coordinator.state.publication.version
        return pb.ModelRef(
            version=publication.version,
            digest=publication.digest,
            size_bytes=publication.size_bytes,
            changes=self._changes(member) if is_newest else [],
            compact=_compact(member, publication),
        )

    def _changes(self, member: ClientDescription) -> list[pb.Change]:
        downlink = self._coordinator.state.downlink
        if not needs(downlink.codec) <= set(member.codecs):
            return []
        return [self._change(change) for change in downlink.changes]

    def _change(self, change: PublishedModel) -> pb.Change:
        downlink = self._coordinator.state.downlink
        return pb.Change(
            version=change.version,
            digest=change.digest,
            size_bytes=change.size_bytes,
            codec=downlink.codec,
            halvings=change.halvings,
            rounded=downlink.steady.name if downlink.steady else "",
        )


def _compact(member: ClientDescription, publication: PublishedModel) -> pb.Compact | None:
    compact = publication.compact
    if compact is None or not needs(compact.codec) <= set(member.codecs):
        return None
    return pb.Compact(codec=compact.codec, digest=compact.digest, size_bytes=compact.size_bytes)
