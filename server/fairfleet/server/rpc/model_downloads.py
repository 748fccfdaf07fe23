"""Downloads of models and of changes: which one a request means, its limits and its counters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from fairfleet.common.errors import NotKept
from fairfleet.proto.v1 import fleet_pb2 as pb
from fairfleet.server.federation.coordinator import Coordinator
from fairfleet.server.rpc.handlers import Context
from fairfleet.server.security.caller import Call
from fairfleet.server.transfer.published_model import PublishedModel


class ModelDownloads:
    """What clients download."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    @contextmanager
    def downloading(self, session: str, context: Context) -> Iterator[Call]:
        """Count a download of the session's client, and keep its lease while it lasts.

        Raises LimitReached if the client has too many downloads.
        """
        client = self._coordinator.clients.session(session).client
        downloads = self._coordinator.request_limits.downloads
        downloads.take(client)
        # Until the call is done, gRPC may hold a message in memory, so the download counts until
        # then. (The stubs describe the context of gRPC's threaded server.)
        context.add_done_callback(lambda _: downloads.give_back(client))  # type: ignore[arg-type]
        with self._coordinator.clients.transferring(client) as call:
            yield call

    def counted(self, messages: Iterable[bytes], codec: str) -> Iterator[bytes]:
        """Yield messages, and count each after it was sent."""
        for message in messages:
            yield message
            self._coordinator.state.traffic.count_sent(codec, len(message))

    def has_shorter_form(self, model: PublishedModel) -> bool:
        """Return whether clients may fetch a model as a change or in fewer bytes, or not at all."""
        return bool(self._coordinator.state.downlink.changes or model.compact or model.retired)

    def published(self, request: pb.FetchModelRequest) -> PublishedModel:
        """Return the model or the change that a request means; raise NotKept if there is none."""
        newest = self._coordinator.state.publication
        for publication in self._changes() if request.change else self._models(request.compact):
            if publication.version == request.version:
                return publication
        if request.compact and not request.change and request.version == newest.version:
            raise NotKept(
                f"version {request.version} has no compact form; fetch it without `compact`. "
                "ModelRef.compact of a task says whether there is one."
            )
        raise NotKept(
            f"{'the change to ' * request.change}version {request.version} is not published; the "
            f"newest is {newest.version}. Request the next task."
        )

    def _models(self, compact: bool) -> list[PublishedModel]:
        """Return the newest model, the initial one, and the result once there is one.

        The initial model is published only for rules that need the clients' loss on it.
        """
        state = self._coordinator.state
        published = (state.publication, state.result, state.initial_model)
        models = [model for model in published if model is not None]
        return [form for model in models if (form := model.compact if compact else model)]

    def _changes(self) -> list[PublishedModel]:
        """Return the changes to committed versions, and the step that clients try."""
        state = self._coordinator.state
        changes = list(state.downlink.changes)
        return [*changes, state.proposal.publication] if state.proposal else changes
