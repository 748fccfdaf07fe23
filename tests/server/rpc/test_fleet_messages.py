"""Messages of clients: checks before the federation sees them, and the answers."""

from __future__ import annotations

import pytest

from fairfleet.common import wire
from fairfleet.common.errors import BadReport, BadRequest, WrongState
from fairfleet.common.privacy import NO_TERMS
from fairfleet.proto.v1 import fleet_pb2 as pb
from fairfleet.server.rpc.fleet_messages import (
    MAX_CODECS,
    MAX_TEXT_CHARS,
    announced_update,
    announcement_in,
    description_in,
    evaluation_in,
    spoken_version,
    upload_token,
)

REPORT = pb.TrainReport(samples=10, loss_before=1.0, loss_after=0.5, steps=1, learning_rate=0.1)


def joining(**fields: object) -> pb.JoinRequest:
    values = {"client": "ann", "instance": "1", "codecs": ["raw32"], **fields}
    return pb.JoinRequest(protocol_version=wire.PROTOCOL_VERSION, **values)


def announcing(**fields: object) -> pb.OpenUploadRequest:
    values = {"round": 3, "codec": "int8", "size_bytes": 9, "digest": bytes(32), **fields}
    return pb.OpenUploadRequest(**{"report": REPORT, **values})


def test_the_device_of_a_client_is_shortened() -> None:
    member = description_in(joining(device="d" * 1000))
    assert (member.client, member.codecs) == ("ann", ("raw32",))
    assert len(member.device) < 120


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"client": ".."}, "client name '..' is not 1 to 64"),
        ({"instance": ""}, "instance is empty"),
        ({"instance": "i" * (MAX_TEXT_CHARS + 1)}, "instance has 65 characters"),
        ({"codecs": ["raw32"] * (MAX_CODECS + 1)}, "found 65 codecs"),
        ({"codecs": ["c" * (MAX_TEXT_CHARS + 1)]}, "found 1 codecs"),
        ({"features": ["counts"] * (MAX_CODECS + 1)}, "found 65 features"),
    ],
)
def test_the_stored_text_of_a_session_is_limited(fields: dict[str, object], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        description_in(joining(**fields))


def test_the_newest_common_protocol_version_is_chosen() -> None:
    assert spoken_version(joining()) == wire.PROTOCOL_VERSION
    assert spoken_version(pb.JoinRequest(protocol_version=99, oldest_protocol_version=1)) == 1


@pytest.mark.parametrize(
    ("oldest", "newest", "message"),
    [
        (0, 99, "version 99; this server speaks 1. Upgrade the server"),
        (50, 99, "version 50 to 99; this server speaks 1. Upgrade the server"),
        (0, 0, "version 0; this server speaks 1. Upgrade the client"),
    ],
)
def test_a_client_without_a_common_protocol_version_is_refused(
    oldest: int, newest: int, message: str
) -> None:
    with pytest.raises(WrongState, match=message):
        spoken_version(pb.JoinRequest(protocol_version=newest, oldest_protocol_version=oldest))


def test_a_reversed_range_of_versions_is_refused() -> None:
    with pytest.raises(BadRequest, match="oldest_protocol_version is 3, above protocol_version 2"):
        spoken_version(pb.JoinRequest(protocol_version=2, oldest_protocol_version=3))


def test_an_announcement_without_report_or_size_is_refused() -> None:
    with pytest.raises(BadReport, match="report is missing"):
        announced_update("ann", announcing(report=None), is_private=False)
    with pytest.raises(BadRequest, match="size_bytes is 0"):
        announced_update("ann", announcing(size_bytes=0), is_private=False)


def test_privacy_terms_count_only_in_a_federation_that_requires_them() -> None:
    request = announcing(privacy=pb.Privacy(clip=1.0, noise_multiplier=2.0))
    assert announced_update("ann", request, is_private=False).terms == NO_TERMS
    assert announced_update("ann", request, is_private=True).terms.noise_multiplier == 2.0


def test_the_metadata_of_an_upload_are_checked() -> None:
    assert announcement_in(announcing().SerializeToString()) == announcing()
    assert upload_token({wire.UPLOAD_METADATA: b"token"}) == b"token"
    with pytest.raises(BadRequest, match="not a serialized OpenUploadRequest"):
        announcement_in(b"\xff")
    with pytest.raises(BadRequest, match=wire.UPLOAD_METADATA):
        upload_token({})


def test_an_evaluation_is_a_result_or_a_failure() -> None:
    evaluation = pb.Evaluation(samples=5, loss=0.25)
    result = evaluation_in(pb.ReportEvaluationRequest(evaluation=evaluation), ())
    assert result is not None
    assert (result.samples, result.loss) == (5, 0.25)
    assert evaluation_in(pb.ReportEvaluationRequest(failure="no data"), ()) is None
    with pytest.raises(BadRequest, match="both missing"):
        evaluation_in(pb.ReportEvaluationRequest(), ())
    request = pb.ReportEvaluationRequest(evaluation=pb.Evaluation(loss=0.25))
    with pytest.raises(BadRequest, match=r"evaluation\.samples is 0"):
        evaluation_in(request, ())
