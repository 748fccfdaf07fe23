"""The settings of a client, with their defaults.

They are read once, from the command line, a YAML file and FAIRFLEET_ variables. The result is
frozen; the code below `fairfleet client` receives only the values that it needs.
"""

from __future__ import annotations

import re
import socket
from pathlib import Path

from platformdirs.unix import Unix
from pydantic import Field, PositiveFloat, field_validator, model_validator

from fairfleet.client.device.availability import EVERY_SECONDS
from fairfleet.client.device.replica import MARK, Source
from fairfleet.client.training.budget import Budget
from fairfleet.common.cli.settings import Settings
from fairfleet.common.errors import UsageError
from fairfleet.common.names import check_name, replace_forbidden
from fairfleet.common.net.server_access import ServerAccess
from fairfleet.common.pki.identity import Role


def host_name() -> str:
    """Return this machine's host name as a valid client name."""
    return replace_forbidden(socket.gethostname()) or "client"


def default_state_dir() -> Path:
    """Return the directory for a client's state: ~/.local/state/fairfleet, or in XDG_STATE_HOME.

    It is the same on macOS, so that a client finds the state that earlier versions left there.
    """
    return Unix("fairfleet", appauthor=False).user_state_path


def host_and_port(text: str) -> tuple[str, int] | None:
    """Parse `host:port`; an IPv6 address is in brackets. Return None if the text is malformed.

    >>> host_and_port("[::1]:9441"), host_and_port("127.0.0.1:99999")
    (('::1', 9441), None)
    """
    match = re.fullmatch(
        r"\[(?P<ipv6>[^\]]+)\]:(?P<port>[0-9]{1,5})|(?P<host>[^\[\]]+):(?P<number>[0-9]{1,5})", text
    )
    if match is None:
        return None
    port = int(match["port"] or match["number"])
    return (match["ipv6"] or match["host"], port) if port < 1 << 16 else None


class ClientSettings(Settings):
    """Everything that can be set for one client."""

    server: str = Field(
        default="127.0.0.1:8440",
        description="host:port of the server; with credentials, the default is the address in them",
    )
    credentials: Path | None = Field(
        default=None,
        description="NAME.fleet from `fairfleet enroll`: the server's address and this identity",
    )
    insecure: bool = Field(
        default=False, description="connect to another machine without encryption"
    )
    name: str = Field(default_factory=host_name, description="identity of this client")
    task: str = Field(
        description="module:name of a Task, or of a function that builds one",
        examples=["--task my_task:task"],
    )
    options: dict[str, str] = Field(
        default={}, description="arguments for the function that builds the task"
    )
    state_dir: Path = Field(
        default_factory=default_state_dir, description="directory for updates not yet sent"
    )
    replica: Source | None = Field(
        default=None,
        description=f"source of the number that replaces {MARK} in name and options: hostname (the "
        "number at the end of the host name) or claim (the lowest number that is free in the "
        "shared state_dir)",
    )
    budget: Budget = Field(
        default=Budget(), description="limits of one training on this machine, if below the plan"
    )
    when: tuple[str, ...] = Field(
        default=(),
        description="train only while all these conditions hold: idle, idle=25 (percent used by "
        "other processes), mains, unmetered, run=COMMAND, module:name (docs/how-to/edge.md); "
        "default: always",
    )
    niceness: int = Field(
        default=10,
        ge=0,
        le=19,
        description="scheduling priority of this process: 0 is normal, 19 the lowest",
    )
    when_seconds: PositiveFloat = Field(
        default=EVERY_SECONDS, description="seconds between two checks of these conditions"
    )
    refresh_seconds: PositiveFloat = Field(
        default=30.0,
        description="seconds between two looks for new data while the client is idle, for tasks "
        "with `refresh`",
    )
    device: str = Field(
        default="auto",
        description="auto, cpu, cuda, cuda:1 or mps; for tasks that support a choice",
    )
    least_noise: float = Field(
        default=0.0,
        ge=0,
        description="smallest noise multiplier with which an update may leave this machine "
        "(docs/explanation/privacy.md)",
    )
    max_epsilon: PositiveFloat | None = Field(
        default=None,
        description="largest epsilon of all that this client releases, over all federations; it "
        "retires before a release that would exceed it (docs/explanation/privacy.md). Default: no "
        "limit",
    )
    delta: float = Field(
        default=1e-5, gt=0, lt=1, description="delta of max_epsilon; well below 1 / clients"
    )
    send_error_text: bool = Field(
        default=False,
        description="send the text of a task's error to the server too, which may quote the data; "
        "default: only its type",
    )
    save_model: Path | None = Field(
        default=None,
        description=".safetensors file for the model: replaced at each evaluation and at the end, "
        "as far as the federation's terms allow; default: none",
    )
    error_feedback: bool = Field(
        default=True,
        description="keep on disk what updates lost to their codec, and send it later, where the "
        "server wants it; false saves writes (docs/how-to/edge.md)",
    )
    metrics: str | None = Field(
        default=None,
        description="host:port to serve this client's own metrics on; default: not served",
    )

    @field_validator("metrics")
    @classmethod
    def _check_metrics_address(cls, metrics: str | None) -> str | None:
        if metrics is not None and not host_and_port(metrics):
            raise ValueError(
                "must be host:port, for example 127.0.0.1:9441; port 0 selects a free one"
            )
        return metrics

    @field_validator("save_model")
    @classmethod
    def _make_absolute(cls, path: Path | None) -> Path | None:
        return path and path.absolute()  # a task may change the current directory

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        return check_name(name, "client name", placeholder=MARK)

    @field_validator("server")
    @classmethod
    def _check_server_address(cls, server: str) -> str:
        if not host_and_port(server):
            raise ValueError("must be host:port, for example fleet.example:8440")
        return server

    @model_validator(mode="after")
    def _check_replica_source(self) -> ClientSettings:
        if self.replica is None and any(
            MARK in text for text in (self.name, str(self.save_model or ""), *self.options.values())
        ):
            raise ValueError(
                f"{MARK} is used without a source for its number: set replica to hostname or claim"
            )
        return self

    def numbered(self, number: int) -> ClientSettings:
        """Return these settings with the replica's number in place of `{replica}`."""
        options = {key: value.replace(MARK, str(number)) for key, value in self.options.items()}
        update: dict[str, object] = {"options": options}
        # A name without the mark may be a default. It must stay unset, as credentials have a name.
        if MARK in self.name:
            update["name"] = self.name.replace(MARK, str(number))
        if self.credentials:
            update["credentials"] = Path(str(self.credentials).replace(MARK, str(number)))
        if self.save_model:
            update["save_model"] = Path(str(self.save_model).replace(MARK, str(number)))
        return self.model_copy(update=update)

    def identified(self) -> tuple[ClientSettings, ServerAccess]:
        """Return these settings with the name in the credentials, and the access to the server.

        Without credentials the settings are returned unchanged. Raises UsageError if the
        credentials belong to an operator or a server, or to a client of another name.
        """
        given = self.model_fields_set
        address = self.server if self.credentials is None or "server" in given else None
        access = ServerAccess(address, self.credentials, self.insecure)
        if access.credentials is None:
            return self, access
        identity = access.credentials.identity
        if identity.role is not Role.CLIENT:
            raise UsageError(
                f"{self.credentials} is the credential of {identity}; "
                "a client needs a client's credential"
            )
        if "name" in given and self.name != identity.name:
            raise UsageError(
                f"these credentials are of {identity}, not of --name {self.name}: the name in the "
                "certificate is the client's. Leave --name out, or give the right --credentials."
            )
        return self.model_copy(update={"name": identity.name}), access
