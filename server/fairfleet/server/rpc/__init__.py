"""The gRPC services, who may call them, and the mapping of errors to status codes.

`FleetService` answers clients, `OperatorService` operators, and `EnrolmentService` new devices.
`Endpoints` opens the ports.
"""

from fairfleet.server.rpc.authorization import Authorization
from fairfleet.server.rpc.channel_options import connection_limits
from fairfleet.server.rpc.endpoints import Endpoints, check_transport
from fairfleet.server.rpc.enrolment_service import EnrolmentService
from fairfleet.server.rpc.fleet_service import FleetService
from fairfleet.server.rpc.handlers import service_handler
from fairfleet.server.rpc.operator_service import OperatorService

__all__ = [
    "Authorization",
    "Endpoints",
    "EnrolmentService",
    "FleetService",
    "OperatorService",
    "check_transport",
    "connection_limits",
    "service_handler",
]
