"""What operators do is recorded with the name in their certificate, and can be read again."""

from __future__ import annotations

import json
from typing import Any

import grpc
import pytest

from fairfleet.proto.v1 import operator_pb2 as pb
from fairfleet.proto.v1.operator_pb2_grpc import OperatorStub
from tests.support.secure import SecureFleet, operator


def audit_of(fleet: SecureFleet, who: str, *words: str) -> list[dict[str, Any]]:
    """Return what `fairfleet audit --json` prints for this operator."""
    done = run_as(fleet, who, "audit", "--json", *words)
    return [json.loads(line) for line in done.stdout.splitlines()]


def run_as(fleet: SecureFleet, who: str, *words: str, exit_code: int = 0) -> Any:
    """Run a command as this operator."""
    file = fleet.credentials_file(operator(who))
    done = fleet.run(*words, "--credentials", str(file))
    assert done.returncode == exit_code, done.stderr
    return done


def test_actions_have_the_name_of_their_operator_and_survive_a_restart(own: SecureFleet) -> None:
    own.init()
    own.start_server(rounds=1000, pki=own.pki)
    run_as(own, "day", "pause")
    run_as(own, "night", "resume")
    run_as(own, "night", "revoke", "mallory", "--reason", "stolen [red]")
    run_as(own, "day", "export", "--version", "0", "--output", str(own.folder / "out.safetensors"))
    run_as(own, "day", "export", "--version", "7", "--output", str(own.folder / "n"), exit_code=4)
    run_as(own, "day", "token", "kitchen")
    run_as(own, "day", "stop", "--yes", "--reason", "enough")
    own.kill_server()
    own.start_server(rounds=2000)
    entries = audit_of(own, "night")
    shown = [(entry["operator"], entry["action"], bool(entry["result"])) for entry in entries]
    assert shown == [
        ("day", "pause", False),
        ("night", "resume", False),
        ("night", "revoke", False),
        ("day", "export", False),
        ("day", "export", True),
        ("day", "make-token", False),
        ("day", "stop", False),
        ("", "settings", False),
    ]
    assert [entry["sequence"] for entry in entries] == list(range(1, 9))
    assert entries[2]["arguments"] == {"client": "mallory", "reason": "stolen [red]"}
    assert "version 7 is not kept" in entries[4]["result"]
    assert entries[5]["arguments"]["client"] == "kitchen"
    assert entries[6]["arguments"] == {"reason": "enough"}
    assert entries[7]["arguments"] == {"rounds": [1000, 2000]}
    table = run_as(own, "day", "audit", "--action", "revoke").stdout
    assert "night" in table
    assert "[red]" in table
    assert "day" not in table
    assert audit_of(own, "day", "--since", "2999-01-01") == []


def test_no_secret_of_a_token_is_recorded(own: SecureFleet) -> None:
    own.init()
    own.start_server()
    stub = OperatorStub(own.channel())
    request = pb.MakeTokenRequest(client="kitchen", seconds=60, certificate_seconds=600)
    secret = stub.MakeToken(request, timeout=10).secret
    (entry,) = list(stub.Audit(pb.AuditRequest(), timeout=10))
    assert entry.action == "make-token"
    assert json.loads(entry.arguments_json) == {
        "client": "kitchen",
        "seconds": 60.0,
        "certificate_seconds": 600.0,
    }
    assert secret.hex() not in entry.SerializeToString().hex()


def test_a_refused_action_is_recorded_with_its_reason(own: SecureFleet) -> None:
    own.init()
    own.start_server()
    stub = OperatorStub(own.channel())
    with pytest.raises(grpc.RpcError):
        stub.Revoke(pb.RevokeRequest(client="no/name", reason="x" * 5000), timeout=10)
    (entry,) = list(stub.Audit(pb.AuditRequest(), timeout=10))
    assert (entry.operator, entry.action) == ("operator", "revoke")
    assert "no/name" in entry.result
    assert len(entry.arguments_json) < 500


def test_the_audit_is_sent_from_a_sequence_number_on_and_in_pages(own: SecureFleet) -> None:
    own.init()
    own.start_server()
    stub = OperatorStub(own.channel())
    for _ in range(130):
        stub.Pause(pb.PauseRequest(), timeout=10)
    sequences = [entry.sequence for entry in stub.Audit(pb.AuditRequest(first=5), timeout=10)]
    assert sequences == list(range(5, 131))


def test_stop_without_a_terminal_needs_yes(own: SecureFleet) -> None:
    own.init()
    own.start_server()
    refused = run_as(own, "day", "stop", exit_code=2)
    assert "--yes" in refused.stderr
    assert own.status().phase != pb.PHASE_FINISHED
    assert audit_of(own, "day") == []


def test_the_table_shows_long_names_to_their_end(own: SecureFleet) -> None:
    own.init()
    own.start_server()
    names = ("x" * 63 + "Q", "x" * 63 + "Z")
    for name in names:
        run_as(own, name, "pause")
    table = run_as(own, "day", "audit").stdout
    assert [letter for letter in table if letter in "QZ"] == ["Q", "Z"]
    assert [entry["operator"] for entry in audit_of(own, "day")] == [*names]
