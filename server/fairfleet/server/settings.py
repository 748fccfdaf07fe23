"""Everything a server can be told, with its defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from fairfleet.common.codecs import codec_named
from fairfleet.common.errors import BadRequest
from fairfleet.common.plan import Plan
from fairfleet.common.settings import Settings
from fairfleet.server.rounds import Policy
from fairfleet.server.rules import Recipe, RuleError, optimizer, recipe

PLAN_FIELDS = {"mu": "proximal_mu", "ditto_lambda": "personal_lambda"}  # the papers' names and ours


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


class Named(BaseModel):
    """A rule or an optimizer by name, with whatever parameters it has."""

    model_config = ConfigDict(frozen=True, extra="allow")
    name: str

    @property
    def parameters(self) -> dict[str, Any]:
        return self.model_extra or {}


class ServerSettings(Settings):
    name: str = Field(default="federation", pattern=r"^[A-Za-z0-9._-]{1,64}$")
    listen: str = Field(default="127.0.0.1:8440", description="host:port; port 0 takes a free one")
    state_dir: Path = Path("fairfleet-state")
    model: Path | None = Field(default=None, description="initial .safetensors; only for a new state directory")
    rounds: PositiveInt = 100
    seed: NonNegativeInt = 0
    round: RoundSettings = RoundSettings()
    rule: Named = Field(default=Named(name="fedavg"), description="see `fairfleet rules`")
    optimizer: Named | None = Field(default=None, description="after the rule, instead of the rule's own")
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
        try:
            return codec_named(name).name
        except BadRequest as error:
            raise ValueError(str(error)) from None

    @field_validator("listen")
    @classmethod
    def _host_and_port(cls, listen: str) -> str:
        host, _, port = listen.rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise ValueError("must be host:port, for example 127.0.0.1:8440 or [::1]:8440")
        return listen

    @model_validator(mode="after")
    def _known_rule(self) -> ServerSettings:
        try:
            self.recipe()
        except RuleError as error:
            raise ValueError(str(error)) from None
        return self

    def recipe(self) -> Recipe:
        after = optimizer(self.optimizer.name, **self.optimizer.parameters) if self.optimizer else None
        return recipe(self.rule.name, after, **self.rule.parameters)

    def plan_of(self, made: Recipe) -> Plan:
        """The plan, with what the rule asks of local training."""
        return self.plan.model_copy(update={PLAN_FIELDS[key]: value for key, value in made.plan.items()})

    def policy(self) -> Policy:
        wanted = self.round
        return Policy(self.rounds, wanted.quorum, wanted.evaluate_every, wanted.minimum_clients)
