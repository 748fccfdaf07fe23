"""The Enrolment service: each method translates, calls one plain function, translates back."""

from __future__ import annotations

from fairfleet.common.errors import NotAllowed
from fairfleet.proto.v1 import enrolment_pb2 as pb
from fairfleet.server.authorization import shown_by
from fairfleet.server.enrolling import Enrolling
from fairfleet.server.handlers import Context


class EnrolmentService:
    def __init__(self, enrolling: Enrolling) -> None:
        self._enrolling = enrolling

    async def Enrol(self, request: pb.EnrolRequest, context: Context) -> pb.EnrolResponse:  # noqa: N802
        certificate = await self._enrolling.enrol(request.client, request.secret, request.request, context.peer())
        return pb.EnrolResponse(certificate=certificate)

    async def Renew(self, request: pb.RenewRequest, context: Context) -> pb.RenewResponse:  # noqa: N802
        present = shown_by(context)
        if present is None:
            raise NotAllowed("without a certificate there is none to renew")
        return pb.RenewResponse(certificate=self._enrolling.renew(present, request.request))
