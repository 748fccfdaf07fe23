"""The settings of a server, with their defaults and descriptions.

The object is frozen and read once at start. Below `app`, functions receive single values.
"""

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

from fairfleet.common.cli.settings import Settings
from fairfleet.common.codecs import FeedbackSetting, codec_named
from fairfleet.common.errors import BadRequest
from fairfleet.common.names import check_name, check_schema_name
from fairfleet.common.training_plan import LossMeasurement, LossPlan, Plan
from fairfleet.common.wire import MOST_HALVINGS
from fairfleet.server.aggregation.admission import AdmissionSettings
from fairfleet.server.aggregation.diagnostics import DiagnosticsSetting
from fairfleet.server.aggregation.history import HistorySettings
from fairfleet.server.privacy.settings import PrivacySettings, refusal
from fairfleet.server.rounds.end_settings import EndSettings
from fairfleet.server.rounds.limits import Limits
from fairfleet.server.rounds.loss_measurement import LossSettings, check_rule_loss, uses_losses
from fairfleet.server.rounds.measure_choice import AUTO_MEASURE, MeasureChoice
from fairfleet.server.rounds.round_settings import RoundSettings
from fairfleet.server.rounds.state_machine import Policy
from fairfleet.server.rounds.verification import Fallback, VerificationPolicy
from fairfleet.server.rules import Recipe, RuleError, optimizer, recipe
from fairfleet.server.rules.registry import PLAN_FIELDS
from fairfleet.server.security.http_settings import HttpSettings
from fairfleet.server.security.limits import ServerLimits
from fairfleet.server.transfer.codec_selection import AUTO, CodecPolicy

HTTP_PORT = 8441


class SettingsSection(BaseModel):
    """A group of settings; an unknown name in it is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class VerificationSettings(SettingsSection):
    """Clients try a step and shorter ones first; see docs/explanation/verification.md."""

    halvings: int = Field(
        default=4, ge=0, le=MOST_HALVINGS, description="try 2^-k of the step for k = 0 to this"
    )
    threshold: float = Field(default=0.8, gt=0, le=1, description="share of losses that must fall")
    quorum: float = Field(
        default=0.5, gt=0, le=1, description="share of the participants that must answer"
    )
    deadline_seconds: PositiveFloat = Field(default=120.0, description="time for the answers")
    fallback: Fallback = Field(
        default="smallest",
        description="when no step passes: commit the full one, the smallest tried, or skip",
    )

    def terms(self) -> VerificationPolicy:
        """Return the values that decide which step passes."""
        return VerificationPolicy(**self.model_dump(exclude={"deadline_seconds"}))


class ServerEvaluationSettings(SettingsSection):
    """A task with test data of the server's own, on which committed versions are evaluated."""

    task: str = Field(description="module:name, as for `fairfleet client --task`")
    options: dict[str, str] = Field(default={}, description="options of the task, by name")
    every: PositiveInt | None = Field(
        default=None,
        description="rounds between evaluations; the last version is evaluated too. Default: "
        "round.evaluate_every",
    )
    deadline_seconds: PositiveFloat = Field(
        default=600.0, description="an evaluation that takes longer has failed"
    )
    niceness: int = Field(default=10, ge=0, le=19, description="of the worker process")


class CompressionSettings(SettingsSection):
    """How updates and models are compressed."""

    error_feedback: FeedbackSetting = Field(
        default="auto",
        description="add what a lossy codec omits to the next update; auto: for biased codecs "
        "only, so not for int8 and int4",
    )
    prediction: bool = Field(
        default=True,
        description="topk, topsign: send each update as its difference from the client's last one, "
        "which the server stores",
    )
    prediction_bytes: PositiveInt | None = Field(
        default=None,
        description="disk space for clients' last updates; the oldest are deleted first. "
        "Default: no limit",
    )
    clients: dict[str, str] = Field(default={}, description="codec by client, or auto")
    downlink: str = Field(
        default="raw32", description="codec of models; a lossy one sends the changes of each round"
    )
    changes: int = Field(
        default=4,
        ge=1,
        le=64,  # a task names them all, and gRPC limits this metadata to 8 KiB
        description="number of past rounds whose changes a client can still download",
    )
    model: Literal["raw32", "fp16", "bf16", "int8"] = Field(
        default="raw32",
        description="format to which every model is rounded and in which it is sent; the rounding "
        "error is added to the next model",
    )
    auto_upload_seconds: PositiveFloat = Field(
        default=10.0,
        description="codec auto: choose the most exact codec whose upload takes no longer at the "
        "client's measured uplink rate",
    )

    @field_validator("downlink")
    @classmethod
    def _known_downlink(cls, name: str) -> str:
        if known_codec(name) == AUTO:
            raise ValueError("auto is for updates only; give the name of a codec")
        return name

    @field_validator("clients")
    @classmethod
    def _known_codecs(cls, clients: dict[str, str]) -> dict[str, str]:
        return {client: known_codec(name) for client, name in clients.items()}


def known_codec(name: str) -> str:
    """Return the full name of a codec, or auto. Raises ValueError for an unknown one."""
    try:
        return AUTO if name == AUTO else codec_named(name).name
    except BadRequest as error:
        raise ValueError(f"{error}; or use auto") from None


class NamedChoice(BaseModel):
    """A rule or an optimizer by name, with any parameters that it has."""

    model_config = ConfigDict(frozen=True, extra="allow")
    name: str = Field(description="the name, as listed by `fairfleet rules`")

    @property
    def parameters(self) -> dict[str, Any]:
        """The values beside the name."""
        return self.model_extra or {}


class ServerSettings(Settings):
    """All settings of a server."""

    name: str = Field(default="federation", description="name of the federation")
    listen: str = Field(default="127.0.0.1:8440", description="host:port; port 0: a free one")
    http: HttpSettings = HttpSettings()
    pki: Path | None = Field(
        default=None, description="folder of `fairfleet pki init`: serve with TLS"
    )
    enrolment: str | None = Field(
        default=None,
        description="host:port at which devices enroll with a token; needs ca.key in the pki "
        "folder; default: none",
    )
    insecure: bool = Field(default=False, description="allow other machines to connect without TLS")
    state_dir: Path = Field(
        default=Path("fairfleet-state"), description="directory for the server's persistent state"
    )
    database: str | None = Field(
        default=None,
        description="postgresql+psycopg://user:password@host/name; default: SQLite in state_dir",
    )
    database_schema: str | None = Field(
        default=None,
        description="schema of the database for this federation alone, created if it is missing; "
        "default: the database's default schema, usually public",
    )
    model: Path | None = Field(
        default=None, description="initial .safetensors; only for a new state directory"
    )
    rounds: PositiveInt = Field(default=100, description="number of rounds to train")
    seed: NonNegativeInt = Field(default=0, description="seed of the random selection of clients")
    round: RoundSettings = RoundSettings()
    end: EndSettings = EndSettings()
    evaluation: ServerEvaluationSettings | None = Field(
        default=None, description="test data of the server's own; default: none"
    )
    measure: str = Field(
        default=AUTO_MEASURE,
        description="by which versions are compared and clients listed: accuracy, loss or a "
        "measure that tasks report, such as auc or score:higher (or score:lower), which also says "
        "which values are better; auto: accuracy where clients report it, else loss",
    )
    verification: VerificationSettings | None = Field(
        default=None,
        description="clients verify every step before it is taken; default: none",
    )
    admission: AdmissionSettings = Field(
        default=AdmissionSettings(),
        description="handling of unusual updates; default: they are only counted",
    )
    diagnostics: DiagnosticsSetting = Field(
        default="auto",
        description="figures of each round: full: per layer, with the conflict map; model: over "
        "the whole model; off: none that need inner products; auto: as many as the size of the "
        "round allows",
    )
    history: HistorySettings = HistorySettings()
    losses: LossSettings = LossSettings()
    privacy: PrivacySettings | None = Field(
        default=None, description="differential privacy of clients; default: none"
    )
    rule: NamedChoice = Field(
        default=NamedChoice(name="fedavg"), description="see `fairfleet rules`"
    )
    optimizer: NamedChoice | None = Field(
        default=None, description="server optimizer, instead of the rule's own"
    )
    plan: Plan = Plan()
    codec: str = Field(
        default="int8", description="codec of updates, or auto; a client may offer another"
    )
    compression: CompressionSettings = CompressionSettings()
    durability: Literal["update", "round"] = Field(
        default="update",
        description="update: an acknowledged update survives a crash; round: only a committed "
        "round does",
    )
    keep_models: PositiveInt = Field(
        default=5,
        description="newest versions stored on disk; version 0 and the best evaluated one stay too",
    )
    clients_keep: Literal["received", "final", "none"] = Field(
        default="received",
        description="models that participants may keep: received: all that they were sent; final: "
        "the federation's result; none. Clients honour it, a server cannot enforce it",
    )
    lease_seconds: PositiveFloat = Field(
        default=30.0, description="a client counts as disconnected after this time without contact"
    )
    limits: ServerLimits = ServerLimits()
    tensorboard: Path | None = Field(
        default=None, description="folder for TensorBoard event files; default: none"
    )
    exit_when_finished: bool = Field(
        default=False, description="exit when every client knows that training is finished"
    )

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        return check_name(name, "federation name")

    @field_validator("database_schema")
    @classmethod
    def _schema_name(cls, name: str | None) -> str | None:
        return name if name is None else check_schema_name(name)

    @model_validator(mode="after")
    def _schema_needs_a_database(self) -> ServerSettings:
        if self.database_schema and not self.database:
            raise ValueError("database_schema is for a PostgreSQL database: set database as well")
        return self

    @field_validator("codec")
    @classmethod
    def _known_codec(cls, name: str) -> str:
        return known_codec(name)

    @field_validator("measure")
    @classmethod
    def _measure_name(cls, name: str) -> str:
        MeasureChoice.of(name)
        return name

    @model_validator(mode="after")
    def _can_end(self) -> ServerSettings:
        if self.evaluation and not (self.evaluation.every or self.round.evaluate_every):
            raise ValueError(
                "evaluation.task needs evaluation.every, the rounds between evaluations, because "
                "round.evaluate_every is 0"
            )
        self.end.check(MeasureChoice.of(self.measure).name, self.round.evaluate_every)
        return self

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
            check_rule_loss(self.losses, self.recipe(), self.verification, self.privacy)
        except RuleError as error:
            raise ValueError(str(error)) from None
        return self

    @model_validator(mode="after")
    def _private_enough(self) -> ServerSettings:
        if self.privacy is None:
            return self
        recipe = self.recipe()
        tries_steps = self.verification is not None or recipe.rule.needs().line_search
        others = (self.round.selection, self.admission, self.measure)
        reason = refusal(self.privacy, recipe, tries_steps, *others)
        if reason:
            raise ValueError(reason)
        return self

    @property
    def cohort(self) -> int:
        """The divisor of a sum with noise. It does not depend on which clients answer."""
        cohort = self.privacy.cohort if self.privacy else None
        return cohort or self.round.clients or self.round.minimum_clients

    @property
    def http_port(self) -> int:
        """The HTTP port; 0 for a free one.

        If `listen` has port 0, other servers may run on the machine. The default is then 0 too.
        """
        if self.http.port is not None:
            return self.http.port
        return 0 if self.listen.endswith(":0") else HTTP_PORT

    def recipe(self) -> Recipe:
        """Return the rule, as the plan of local training makes it, and its optimizer.

        Raises RuleError for an unknown name or parameter, and for a plan that the rule's formula
        does not cover.
        """
        after = (
            optimizer(self.optimizer.name, **self.optimizer.parameters) if self.optimizer else None
        )
        plain = recipe(self.rule.name, after, **self.rule.parameters)
        return plain.for_plan(plan_for_rule(self.plan, plain))

    @property
    def trying(self) -> VerificationSettings:
        """How steps are verified. A rule may need a line search without `verification`."""
        return self.verification or VerificationSettings(fallback="commit")

    def codec_policy(self, raw_bytes: int) -> CodecPolicy:
        """Return how codecs are chosen, for updates of this size without compression."""
        compression = self.compression
        return CodecPolicy(
            self.codec, compression.clients, compression.auto_upload_seconds, raw_bytes
        )

    @property
    def loss_plan(self) -> LossPlan:
        """What clients are to measure."""
        return self.losses.plan(used=self._uses_losses)

    @property
    def needed_measurement(self) -> LossMeasurement:
        """The least exact measurement of a reported loss that suffices."""
        return self.loss_plan.before if self._uses_losses else "batches"

    @property
    def _uses_losses(self) -> bool:
        verifies, selection = self.verification is not None, self.round.selection
        return uses_losses(self.recipe(), self.admission, selection, verifies=verifies)

    def limits_of_end(self) -> Limits:
        """Return when the federation ends, apart from its results."""
        return Limits(self.rounds, self.end.after_seconds)

    def policy(self) -> Policy:
        """Return the settings that the round's state machine uses."""
        return Policy(
            rounds=self.rounds,
            quorum=self.round.quorum,
            tolerate_missing=self.round.tolerate_missing,
            evaluate_every=self.round.evaluate_every,
            minimum_clients=self.round.minimum_clients,
        )


def plan_for_rule(plan: Plan, recipe: Recipe) -> Plan:
    """Return the plan with the values that the rule requires of local training."""
    return plan.model_copy(update={PLAN_FIELDS[key]: value for key, value in recipe.plan.items()})
