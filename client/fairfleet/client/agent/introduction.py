"""How a client introduces itself to its server."""

from __future__ import annotations

import secrets

from fairfleet.client.task import Measuring, Task
from fairfleet.common import wire
from fairfleet.common.codecs import ABILITIES
from fairfleet.common.features import CLIENT_FEATURES, INITIAL_LOSS, SPOKEN, software
from fairfleet.common.tensors import Signature
from fairfleet.proto.v1 import fleet_pb2 as pb


def join_request(name: str, task: Task, signature: Signature) -> pb.JoinRequest:
    """Return how this client introduces itself to the server."""
    return pb.JoinRequest(
        client=name,
        instance=secrets.token_hex(8),
        protocol_version=SPOKEN.newest,
        oldest_protocol_version=SPOKEN.oldest,
        features=features_of(task),
        software=software(),
        codecs=list(ABILITIES),
        device=task.device,
        train_samples=task.train_samples,
        test_samples=task.test_samples,
        signature=wire.signature_out(signature),
        verifies=isinstance(task, Measuring),
        protects=True,
        predicts=True,
    )


def features_of(task: Task) -> list[str]:
    """Return the features of a client with this task."""
    lacking = set() if isinstance(task, Measuring) else {INITIAL_LOSS}
    return [feature for feature in CLIENT_FEATURES if feature not in lacking]


def federation_key(joined: pb.JoinResponse) -> str:
    """Return the id of the federation that was joined; of an older server, its name."""
    return joined.federation_id or joined.federation
