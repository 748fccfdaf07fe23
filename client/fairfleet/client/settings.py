"""Everything a client can be told, with its defaults."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

from pydantic import Field, PositiveFloat, field_validator, model_validator

from fairfleet.client.budget import Budget
from fairfleet.client.replica import MARK, Source
from fairfleet.client.willing import EVERY_SECONDS
from fairfleet.common.access import Access
from fairfleet.common.errors import UsageError
from fairfleet.common.identity import Role
from fairfleet.common.settings import Settings


def host_name() -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:64] or "client"


def default_state_dir() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME", Path.home() / ".local" / "state")) / "fairfleet"


def host_and_port(text: str) -> tuple[str, int] | None:
    """None if it is no such thing; an IPv6 address stands in brackets.

    >>> host_and_port("[::1]:9441"), host_and_port("127.0.0.1:99999")
    (('::1', 9441), None)
    """
    found = re.fullmatch(r"\[(?P<ipv6>[^\]]+)\]:(?P<port>[0-9]{1,5})|(?P<host>[^\[\]]+):(?P<number>[0-9]{1,5})", text)
    if found is None:
        return None
    port = int(found["port"] or found["number"])
    return (found["ipv6"] or found["host"], port) if port < 1 << 16 else None


NAME = rf"^([A-Za-z0-9._-]|{re.escape(MARK)}){{1,64}}$"


class ClientSettings(Settings):
    server: str = Field(default="127.0.0.1:8440", description="host:port; default with credentials: as they say")
    credentials: Path | None = Field(
        default=None, description="NAME.fleet, of `fairfleet enroll`: address and identity"
    )
    insecure: bool = Field(default=False, description="speak to another machine in the clear")
    name: str = Field(default_factory=host_name, pattern=NAME, description="the identity")
    task: str = Field(description="module:name of a Task, or of a function that makes one")
    options: dict[str, str] = Field(default={}, description="for the function that makes the task")
    state_dir: Path = Field(default_factory=default_state_dir, description="for updates that are not sent yet")
    replica: Source | None = Field(
        default=None,
        description=f"what {MARK} in name and options stands for: the number at the end of the host name (hostname), "
        "or the lowest that no other process holds in the shared state_dir (claim)",
    )
    budget: Budget = Field(default=Budget(), description="this machine's share in one training, if less than the plan")
    when: tuple[str, ...] = Field(
        default=(),
        description="take part only while all are so: idle, idle=25 (percent that others use), mains, unmetered, "
        "run=COMMAND, module:name (docs/edge.md); default: always",
    )
    niceness: int = Field(
        default=10, ge=0, le=19, description="how far this process gives way to others on its machine: 0 not at all"
    )
    when_seconds: PositiveFloat = Field(default=EVERY_SECONDS, description="how often these are asked")
    device: str = Field(default="auto", description="auto, cpu, cuda, cuda:1, mps; for tasks that can choose")
    least_noise: float = Field(
        default=0.0, ge=0, description="noise multiplier without which no update leaves this machine (docs/privacy.md)"
    )
    metrics: str | None = Field(
        default=None, description="host:port to serve this client's own metrics on; default: nowhere"
    )

    @field_validator("metrics")
    @classmethod
    def _where_to_listen(cls, metrics: str | None) -> str | None:
        if metrics is not None and not host_and_port(metrics):
            raise ValueError("must be host:port, for example 127.0.0.1:9441; port 0 takes a free one")
        return metrics

    @field_validator("server")
    @classmethod
    def _host_and_port(cls, server: str) -> str:
        if not host_and_port(server):
            raise ValueError("must be host:port, for example fleet.example:8440")
        return server

    @model_validator(mode="after")
    def _replica_is_known(self) -> ClientSettings:
        if self.replica is None and any(MARK in text for text in (self.name, *self.options.values())):
            raise ValueError(f"{MARK} is used, but not what it stands for: set replica to hostname or claim")
        return self

    def numbered(self, number: int) -> ClientSettings:
        """With the replica's number put in."""
        options = {key: value.replace(MARK, str(number)) for key, value in self.options.items()}
        update: dict[str, object] = {"options": options}
        if MARK in self.name:  # else it may be a default, and the credentials have one
            update["name"] = self.name.replace(MARK, str(number))
        if self.credentials:
            update["credentials"] = Path(str(self.credentials).replace(MARK, str(number)))
        return self.model_copy(update=update)

    def identified(self) -> tuple[ClientSettings, Access]:
        """With the name that the credentials give, and the way to the server; without them, as it is."""
        given = self.model_fields_set
        address = self.server if self.credentials is None or "server" in given else None
        access = Access(address, self.credentials, self.insecure)
        if access.credentials is None:
            return self, access
        who = access.credentials.identity
        if who.role is not Role.CLIENT:
            raise UsageError(f"{self.credentials} is the credential of {who}; a client needs one of its own")
        if "name" in given and self.name != who.name:
            raise UsageError(
                f"these credentials are of {who}, not of --name {self.name}: the certificate's name is the client's. "
                "Leave --name out, or give the right --credentials."
            )
        return self.model_copy(update={"name": who.name}), access
