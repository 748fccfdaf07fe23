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
    SecretStr,
    field_validator,
    model_validator,
)

from fairfleet.common.codecs import CHUNK_BYTES, codec_named
from fairfleet.common.errors import BadRequest
from fairfleet.common.plan import Plan
from fairfleet.common.settings import Settings
from fairfleet.server.admission import Admission
from fairfleet.server.codec_policy import AUTO, CodecPolicy
from fairfleet.server.endings import Ending
from fairfleet.server.privacy import PrivacySettings, refusal
from fairfleet.server.rounds import Policy
from fairfleet.server.rules import Recipe, RuleError, optimizer, recipe
from fairfleet.server.selection import Selection
from fairfleet.server.verification import Fallback, Terms

HTTP_PORT = 8441
MAX_HALVINGS = 64  # of the protocol
PLAN_FIELDS = {"mu": "proximal_mu", "ditto_lambda": "personal_lambda"}  # the papers' names and ours


class Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RoundSettings(Part):
    minimum_clients: PositiveInt = Field(default=2, description="a round begins when so many are connected")
    clients: NonNegativeInt = Field(default=0, description="asked per round; 0 asks all")
    selection: Selection = Field(default="uniform", description="how they are drawn, if not all are asked")
    over_selection: float = Field(default=1.0, ge=1, description="ask so many times more, take the first enough")
    quorum: float = Field(default=0.8, gt=0, le=1, description="share of the wanted that suffices at the deadline")
    tolerate_missing: NonNegativeInt | None = Field(
        default=None, description="instead of quorum: so many of the wanted may be missing at the deadline"
    )
    deadline: Literal["fixed", "adaptive"] = Field(
        default="fixed", description="adaptive: learned from how long trainings took, at most deadline_seconds"
    )
    deadline_seconds: PositiveFloat = 600.0
    shortest_deadline_seconds: PositiveFloat = 10.0
    deadline_factor: float = Field(default=3.0, ge=1, description="adaptive: so many times what 9 of 10 took")
    longest_wait_seconds: PositiveFloat | None = Field(
        default=None, description="end when too few clients were connected for so long; default: wait for ever"
    )
    evaluate_every: NonNegativeInt = Field(default=10, description="rounds; the last is evaluated too; 0: never")
    evaluation_clients: NonNegativeInt = Field(default=0, description="asked per evaluation, by lot; 0 asks all")
    evaluation_deadline_seconds: PositiveFloat = 120.0


class VerificationSettings(Part):
    """Participants try a step, and shorter ones, before it is taken; see docs/verification.md."""

    halvings: int = Field(default=4, ge=0, le=MAX_HALVINGS, description="try 2^-k of the step for k = 0 to this")
    threshold: float = Field(default=0.8, gt=0, le=1, description="share of losses that must fall")
    quorum: float = Field(default=0.5, gt=0, le=1, description="share of the participants whose answers suffice")
    deadline_seconds: PositiveFloat = Field(default=120.0, description="for their answers")
    fallback: Fallback = Field(
        default="smallest", description="when no step passes: commit the whole one, the smallest tried, or skip it"
    )

    def terms(self) -> Terms:
        return Terms(**self.model_dump(exclude={"deadline_seconds"}))


class HistorySettings(Part):
    """The latest update of every client, for rules that use those of absent ones."""

    precision: Literal["float32", "float16"] = "float32"
    keep_rounds: PositiveInt | None = Field(default=None, description="older rows are forgotten; default: never")
    keep_bytes: PositiveInt | None = Field(default=None, description="the oldest rows beyond are forgotten")


class End(Part):
    """Reasons to end before all rounds are done."""

    after_seconds: PositiveFloat | None = Field(default=None, description="since the federation began")
    worst_10_percent: float | None = Field(
        default=None, gt=0, le=1, description="mean accuracy of the worst-served tenth that is good enough"
    )
    plateau: NonNegativeInt = Field(
        default=0, description="evaluations in a row that found no better worst-served tenth; 0: never"
    )
    plateau_margin: float = Field(default=0.001, ge=0, description="what counts as better")

    def ending(self) -> Ending:
        return Ending(**self.model_dump())


class Limits(Part):
    """What peers may take of the server. docs/limits.md: what they are told, and why the defaults suit honest ones."""

    clients: PositiveInt = Field(default=10_000, description="connected at the same time")
    known_clients: PositiveInt = Field(default=100_000, description="names that ever took part")
    polls_per_second: PositiveInt = Field(
        default=200, description="of idle clients: larger fleets are told to come back later"
    )
    joins_per_minute: PositiveInt = Field(default=120, description="of one client")
    polls_per_minute: PositiveInt = Field(
        default=60, description="of one client, of those that bring it nothing new; a poll that finds a task is free"
    )
    calls_per_minute: PositiveInt = Field(default=12_000, description="of one client")
    enrolments_per_minute: PositiveInt = Field(
        default=30, description="of one client with its token or certificate; and wrong tokens from one address"
    )
    wrong_tokens_per_minute: PositiveInt = Field(
        default=600, description="from everywhere; those beyond are not looked at or logged, but a right one always is"
    )
    message_bytes: int = Field(default=4 << 20, ge=CHUNK_BYTES + (1 << 16), le=64 << 20, description="of one message")
    metadata_bytes: int = Field(default=16 << 10, ge=4 << 10, le=1 << 20, description="of one call's metadata")
    model_bytes: PositiveInt = Field(default=16 << 30, description="of the initial model's file")
    upload_bytes: PositiveInt | None = Field(default=None, description="of one update; default: what raw32 needs")
    uploads: PositiveInt = Field(default=512, description="received at the same time; others wait for their turn")
    uploads_per_client: PositiveInt = Field(
        default=4, description="at the same time: one, and those that a bad link has cut off"
    )
    downloads_per_client: PositiveInt = Field(default=4, description="at the same time")
    idle_seconds: PositiveFloat = Field(
        default=300.0,
        description="for which a stream may send or read nothing; a link must move a chunk of 1 MiB in so long",
    )
    handshake_seconds: PositiveFloat = Field(default=20.0, description="for a new connection to become one")
    connections: PositiveInt | None = Field(
        default=None, description="open; default: 2 for each of `clients`, and 1000"
    )
    enrolment_connections: PositiveInt = Field(default=1000, description="open at the port for tokens, for a minute")
    streams_per_connection: PositiveInt = Field(default=256, description="calls under way over one connection")
    http_connections: PositiveInt = Field(default=256, description="open at the HTTP endpoint; each holds a thread")
    http_viewers: PositiveInt = Field(default=64, description="of the page at the same time")
    http_header_bytes: PositiveInt = Field(default=16 << 10, description="of one request: its line and its headers")
    http_seconds: PositiveFloat = Field(default=30.0, description="for a request to come, and for its answer to go")

    @property
    def most_connections(self) -> int:
        return self.connections or 2 * self.clients + 1000

    @property
    def most_calls(self) -> int:
        """Under way at the same time: a poll and a transfer of every client, and some for operators."""
        return 2 * self.clients + 1000


class Compression(Part):
    error_feedback: bool = Field(default=True, description="what a lossy codec leaves out is sent with the next update")
    prediction: bool = Field(
        default=True,
        description="topk, topsign: updates tell how they differ from the client's last one, which the server keeps",
    )
    prediction_bytes: PositiveInt | None = Field(
        default=None, description="of disk for clients' last updates; beyond it the oldest go. Default: no limit"
    )
    clients: dict[str, str] = Field(default={}, description="by client: its own codec, or auto")
    downlink: str = Field(default="raw32", description="of models; a lossy codec sends what changed in a round")
    changes: int = Field(
        default=4,
        ge=1,
        le=64,  # a task names them all, and gRPC takes 8 KiB of it
        description="rounds back that a client can be brought up to date from",
    )
    model: Literal["raw32", "fp16", "bf16", "int8"] = Field(
        default="raw32", description="every model is rounded to it, and sent whole in it; the rest is held back"
    )
    auto_upload_seconds: PositiveFloat = Field(
        default=10.0,
        description="codec auto: the finest whose upload takes no longer over the client's measured uplink",
    )

    @field_validator("downlink")
    @classmethod
    def _known_downlink(cls, name: str) -> str:
        if known_codec(name) == AUTO:
            raise ValueError("auto is for updates only; name a codec")
        return name

    @field_validator("clients")
    @classmethod
    def _known_codecs(cls, clients: dict[str, str]) -> dict[str, str]:
        return {client: known_codec(name) for client, name in clients.items()}


def known_codec(name: str) -> str:
    try:
        return AUTO if name == AUTO else codec_named(name).name
    except BadRequest as error:
        raise ValueError(f"{error}; or auto") from None


class Http(Part):
    host: str = Field(default="127.0.0.1", min_length=1, description="address of the page, /metrics, /healthz, /readyz")
    port: int | None = Field(
        default=None, ge=0, le=65535, description="0 takes a free one, as does the default if `listen` does; else 8441"
    )
    client_series: NonNegativeInt = Field(
        default=100,
        description="series per client in /metrics, as long as no more clients than this are known; 0: never",
    )
    hosts: str = Field(
        default="",
        description="names with a dot that it is called by, with commas; * is any. Addresses, localhost and "
        "other names without a dot need not be given",
    )
    token: SecretStr | None = Field(default=None, description="what callers must show; default: nothing")
    token_file: Path | None = Field(default=None, description="the file that it is in, instead")


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
    http: Http = Http()
    pki: Path | None = Field(default=None, description="folder of `fairfleet pki init`: serve with TLS")
    enrolment: str | None = Field(
        default=None, description="host:port for devices with a token; needs ca.key in the pki folder; default: none"
    )
    insecure: bool = Field(default=False, description="let `listen` be another machine's to reach without TLS")
    state_dir: Path = Path("fairfleet-state")
    database: str | None = Field(
        default=None, description="postgresql+psycopg://user:password@host/name; default: SQLite in state_dir"
    )
    model: Path | None = Field(default=None, description="initial .safetensors; only for a new state directory")
    rounds: PositiveInt = 100
    seed: NonNegativeInt = 0
    round: RoundSettings = RoundSettings()
    end: End = End()
    verification: VerificationSettings | None = Field(
        default=None, description="of every step by the participants, before it is taken; default: none"
    )
    admission: Admission = Field(
        default=Admission(), description="what is done about updates out of the ordinary; default: they are counted"
    )
    history: HistorySettings = HistorySettings()
    privacy: PrivacySettings | None = Field(default=None, description="differential privacy of clients; default: none")
    rule: Named = Field(default=Named(name="fedavg"), description="see `fairfleet rules`")
    optimizer: Named | None = Field(default=None, description="after the rule, instead of the rule's own")
    plan: Plan = Plan()
    codec: str = Field(default="int8", description="for updates, or auto; a client without it may offer another")
    compression: Compression = Compression()
    durability: Literal["update", "round"] = Field(
        default="update", description="update: a receipt survives a crash; round: only a committed round does"
    )
    keep_models: PositiveInt = Field(default=5, description="newest versions kept on the disk")
    lease_seconds: PositiveFloat = Field(default=30.0, description="a client silent for so long counts as gone")
    limits: Limits = Limits()
    tensorboard: Path | None = Field(default=None, description="folder for TensorBoard event files; default: none")
    exit_when_finished: bool = Field(default=False, description="end when the last client has heard of it")

    @field_validator("codec")
    @classmethod
    def _known_codec(cls, name: str) -> str:
        return known_codec(name)

    @field_validator("listen", "enrolment")
    @classmethod
    def _host_and_port(cls, listen: str | None) -> str | None:
        if listen is None:
            return None
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

    @model_validator(mode="after")
    def _private_enough(self) -> ServerSettings:
        if self.privacy is None:
            return self
        made = self.recipe()
        tries_steps = self.verification is not None or made.rule.needs().line_search
        if why := refusal(self.privacy, made, tries_steps, self.round.selection, self.admission):
            raise ValueError(why)
        return self

    @property
    def cohort(self) -> int:
        """What a sum with noise is divided by: settled beforehand, whoever answers."""
        wanted = self.privacy.cohort if self.privacy else None
        return wanted or self.round.clients or self.round.minimum_clients

    @property
    def http_port(self) -> int:
        """A server on a free port is one of several on its machine: then the HTTP port must be free as well."""
        if self.http.port is not None:
            return self.http.port
        return 0 if self.listen.endswith(":0") else HTTP_PORT

    def recipe(self) -> Recipe:
        after = optimizer(self.optimizer.name, **self.optimizer.parameters) if self.optimizer else None
        return recipe(self.rule.name, after, **self.rule.parameters)

    def plan_of(self, made: Recipe) -> Plan:
        """The plan, with what the rule asks of local training."""
        return self.plan.model_copy(update={PLAN_FIELDS[key]: value for key, value in made.plan.items()})

    @property
    def trying(self) -> VerificationSettings:
        """How steps are verified, if they are: a rule may want a line search by itself."""
        return self.verification or VerificationSettings(fallback="commit")

    def codec_policy(self, raw_bytes: int) -> CodecPolicy:
        wanted = self.compression
        return CodecPolicy(self.codec, wanted.clients, wanted.auto_upload_seconds, raw_bytes)

    def policy(self) -> Policy:
        return Policy(
            rounds=self.rounds,
            quorum=self.round.quorum,
            tolerate_missing=self.round.tolerate_missing,
            evaluate_every=self.round.evaluate_every,
            minimum_clients=self.round.minimum_clients,
        )
