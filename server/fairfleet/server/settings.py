"""Everything a server can be told, with its defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from fairfleet.common.codecs import CODECS
from fairfleet.common.plan import Plan
from fairfleet.common.settings import Settings
from fairfleet.server.rounds import Policy


class Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RoundSettings(Part):
    minimum_clients: PositiveInt = Field(default=2, description="a round begins when so many are connected")
    clients: NonNegativeInt = Field(default=0, description="asked per round, drawn uniformly; 0 asks all")
    quorum: float = Field(default=0.8, gt=0, le=1, description="share of the asked that suffices at the deadline")
    deadline_seconds: PositiveFloat = 600.0
    evaluate_every: NonNegativeInt = Field(default=10, description="rounds; the last is evaluated too; 0: never")
    evaluation_deadline_seconds: PositiveFloat = 120.0


class Limits(Part):
    clients: PositiveInt = Field(default=10_000, description="connected at the same time")
    upload_bytes: PositiveInt | None = Field(default=None, description="of one update; default: what raw32 needs")


class ServerSettings(Settings):
    name: str = Field(default="federation", pattern=r"^[A-Za-z0-9._-]{1,64}$")
    listen: str = Field(default="127.0.0.1:8440", description="host:port; port 0 takes a free one")
    state_dir: Path = Path("fairfleet-state")
    model: Path | None = Field(default=None, description="initial .safetensors; only for a new state directory")
    rounds: PositiveInt = 100
    seed: NonNegativeInt = 0
    round: RoundSettings = RoundSettings()
    plan: Plan = Plan()
    codec: str = Field(default="raw32", description="for updates; a client without it may offer another")
    durability: Literal["update", "round"] = Field(
        default="update", description="update: a receipt survives a crash; round: only a committed round does"
    )
    keep_models: PositiveInt = Field(default=5, description="newest versions kept on the disk")
    lease_seconds: PositiveFloat = Field(default=30.0, description="a client silent for so long counts as gone")
    limits: Limits = Limits()
    exit_when_finished: bool = Field(default=False, description="end when the last client has heard of it")

    @field_validator("codec")
    @classmethod
    def _known_codec(cls, name: str) -> str:
        if name not in CODECS:
            raise ValueError(f"unknown codec; known are {', '.join(CODECS)}")
        return name

    @field_validator("listen")
    @classmethod
    def _host_and_port(cls, listen: str) -> str:
        host, _, port = listen.rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise ValueError("must be host:port, for example 127.0.0.1:8440 or [::1]:8440")
        return listen

    def policy(self) -> Policy:
        return Policy(self.rounds, self.round.quorum, self.round.evaluate_every)
