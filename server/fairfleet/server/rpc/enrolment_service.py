"""The Enrolment service: certificates for devices, for a token or a valid certificate."""

from __future__ import annotations

from fairfleet.common.errors import NotAllowed
from fairfleet.proto.v1 import enrolment_pb2 as pb
from fairfleet.server.rpc.authorization import peer_certificate
from fairfleet.server.rpc.handlers import Context
from fairfleet.server.security.enrolment import EnrolmentAuthority


class EnrolmentService:
    """What devices call to get a certificate."""

    def __init__(self, authority: EnrolmentAuthority) -> None:
        self._authority = authority

    async def Enrol(self, request: pb.EnrolRequest, context: Context) -> pb.EnrolResponse:
        """Return a certificate for a one-time token."""
        certificate = await self._authority.enrol(
            request.client, request.secret, request.request, context.peer()
        )
        return pb.EnrolResponse(certificate=certificate)

    async def Renew(self, request: pb.RenewRequest, context: Context) -> pb.RenewResponse:
        """Return a new certificate for the peer that shows a valid one."""
        present = peer_certificate(context)
        if present is None:
            raise NotAllowed("the call has no certificate; call Renew with the one to renew")
        return pb.RenewResponse(certificate=self._authority.renew(present, request.request))
