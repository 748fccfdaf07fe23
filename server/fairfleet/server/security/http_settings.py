"""The settings of the HTTP port: its address, and who may read its pages."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, SecretStr


class HttpSettings(BaseModel):
    """The HTTP port with the dashboard, metrics and health checks."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = Field(
        default="127.0.0.1",
        min_length=1,
        description="address of the dashboard, /metrics, /healthz and /readyz",
    )
    port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="0: a free port; default: 8441, or a free one if `listen` has port 0",
    )
    client_series: NonNegativeInt = Field(
        default=100,
        description="largest number of clients for which /metrics has series per client; 0: never",
    )
    hosts: str = Field(
        default="",
        description="accepted host names that contain a dot, separated by commas; *: any. "
        "Addresses, localhost and other names without a dot are always accepted",
    )
    token: SecretStr | None = Field(
        default=None, description="bearer token that requests must have; default: none"
    )
    token_file: Path | None = Field(default=None, description="file with the token")
