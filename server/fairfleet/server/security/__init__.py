"""Identity of callers, TLS, enrolment and limits: who may call the server, and how often."""

from fairfleet.server.security.caller import Call, OpenCalls, check_speaks_for
from fairfleet.server.security.limits import ServerLimits
from fairfleet.server.security.rate_limits import Refusals
from fairfleet.server.security.request_limits import RequestLimits

__all__ = [
    "Call",
    "OpenCalls",
    "Refusals",
    "RequestLimits",
    "ServerLimits",
    "check_speaks_for",
]
