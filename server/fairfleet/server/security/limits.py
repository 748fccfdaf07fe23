"""The section `limits` of the server's settings: what peers may use of one server.

docs/reference/limits.md says how a peer learns of each limit, and why the defaults suit honest
peers.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt

from fairfleet.common.codecs import CHUNK_BYTES


class ServerLimits(BaseModel):
    """Limits on connections, calls, sizes and memory."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    clients: PositiveInt = Field(default=10_000, description="Clients connected at the same time.")
    known_clients: PositiveInt = Field(
        default=100_000, description="Client names that ever took part."
    )
    polls_per_second: PositiveInt = Field(
        default=200,
        description="Polls of all idle clients together; larger fleets poll less often.",
    )
    joins_per_minute: PositiveInt = Field(default=120, description="Joins of one client.")
    joins_at_once: PositiveInt = Field(
        default=10,
        description="Joins of one client in a burst; further ones at the pace of joins_per_minute.",
    )
    polls_per_minute: PositiveInt = Field(
        default=60,
        description="Polls of one client without a new task; a poll that brings one is free.",
    )
    calls_per_minute: PositiveInt = Field(default=12_000, description="Calls of one client.")
    enrolments_per_minute: PositiveInt = Field(
        default=30,
        description="Certificate requests of one client, and wrong tokens from one address.",
    )
    wrong_tokens_per_minute: PositiveInt = Field(
        default=600,
        description="Wrong tokens from all addresses; more are neither checked nor logged. "
        "A right token is always accepted.",
    )
    message_bytes: int = Field(
        default=4 << 20, ge=CHUNK_BYTES + (1 << 16), le=64 << 20, description="Size of one message."
    )
    metadata_bytes: int = Field(
        default=16 << 10, ge=4 << 10, le=1 << 20, description="Size of one call's metadata."
    )
    model_bytes: PositiveInt = Field(
        default=16 << 30, description="Size of the initial model's file."
    )
    upload_bytes: PositiveInt | None = Field(
        default=None, description="Size of one encoded update; default: what codec raw32 needs."
    )
    quarantine_bytes: NonNegativeInt = Field(
        default=256 * 2**20,
        description="Disk space for updates that made an aggregation fail; "
        "the oldest are deleted first.",
    )
    uploads: PositiveInt = Field(
        default=512, description="Uploads received at the same time; further ones wait."
    )
    uploads_per_client: PositiveInt = Field(
        default=4,
        description="Open uploads of one client: one, and those that a bad connection has cut off.",
    )
    downloads_per_client: PositiveInt = Field(
        default=4, description="Downloads of one client at the same time."
    )
    idle_seconds: PositiveFloat = Field(
        default=300.0,
        description="Time in which a stream may send or read nothing. "
        "A connection must move a chunk of 1 MiB within it.",
    )
    handshake_seconds: PositiveFloat = Field(
        default=20.0, description="Time for the handshake of a new connection."
    )
    connections: PositiveInt | None = Field(
        default=None, description="Open connections; default: 2 * clients + 1000."
    )
    enrolment_connections: PositiveInt = Field(
        default=1000,
        description="Open connections to the port for tokens; each lasts at most a minute.",
    )
    streams_per_connection: PositiveInt = Field(
        default=256, description="Open calls over one connection."
    )
    http_connections: PositiveInt = Field(
        default=256, description="Open connections to the HTTP endpoint; each holds a thread."
    )
    http_viewers: PositiveInt = Field(
        default=64, description="Viewers of the dashboard at the same time."
    )
    http_header_bytes: PositiveInt = Field(
        default=16 << 10, description="Size of the request line and headers of one HTTP request."
    )
    http_seconds: PositiveFloat = Field(
        default=30.0, description="Time to receive one HTTP request, and to send its response."
    )

    @property
    def most_connections(self) -> int:
        """The number of connections that may be open at the same time."""
        return self.connections or 2 * self.clients + 1000

    @property
    def most_calls(self) -> int:
        """The number of calls answered at the same time.

        It allows a poll and a transfer for every client, and some calls for operators.
        """
        return 2 * self.clients + 1000
