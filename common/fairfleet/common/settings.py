"""Reading settings: flags over FAIRFLEET_* variables over a YAML file over defaults, all mistakes reported at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from fairfleet.common.errors import BadSettings, UsageError

PREFIX = "FAIRFLEET_"
NOT_YAML = (yaml.YAMLError, ValueError)  # ValueError: bytes that are not UTF-8, or a date such as 2024-13-01


class Settings(BaseSettings):
    """The base of each program's settings: one frozen object, read once in `main`."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix=PREFIX,
        env_nested_delimiter="__",
        nested_model_default_partial_update=True,
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)  # read_settings stacks the sources itself: it knows the file's name


S = TypeVar("S", bound=Settings)
M = TypeVar("M", bound=BaseModel)


def read_settings(kind: type[S], file: Path | None, flags: dict[str, Any]) -> S:
    """`flags` holds what was given on the command line; keys may be dotted paths (`plan.learning_rate`)."""
    values = _read_yaml(file) if file else {}
    try:
        _merge(values, EnvSettingsSource(kind)())
    except SettingsError as error:
        raise BadSettings(f'{error}. In a variable, a list is JSON: {PREFIX}WHEN=\'["mains", "idle"]\'') from None
    _merge(values, _nested(flags))
    try:
        return kind(**InitSettingsSource(kind, values)())
    except ValidationError as error:
        raise BadSettings(_explain(error, file, f"{PREFIX}* or flags")) from None


def read_model(kind: type[M], file: Path | None, flags: dict[str, Any]) -> M:
    """The same for a description of something (an experiment), which no variable of the environment changes."""
    values = _read_yaml(file) if file else {}
    _merge(values, _nested(flags))
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise BadSettings(_explain(error, file, "flags")) from None


def pair(text: str) -> tuple[str, Any]:
    """`--set path=value`, the value as YAML would read it."""
    path, found, value = text.partition("=")
    if not found:
        raise UsageError(f"--set {text!r} is not of the form path=value, for example plan.learning_rate=0.05")
    try:
        return path, yaml.safe_load(value)
    except NOT_YAML as error:
        raise BadSettings(f"--set {text!r}: the value is not YAML: {error}") from None


def _nested(flags: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for path, value in flags.items():
        *parents, last = path.split(".")
        branch: dict[str, Any] = {last: value}
        for parent in reversed(parents):
            branch = {parent: branch}
        _merge(values, branch)
    return values


def _merge(into: dict[str, Any], values: dict[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadSettings(f"cannot read the settings file {file}: {error.strerror}") from None
    except NOT_YAML as error:
        raise BadSettings(f"{file} is not YAML: {error}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise BadSettings(f"{file} must hold a mapping of settings, found {type(values).__name__}")
    return values


def _explain(error: ValidationError, file: Path | None, others: str) -> str:
    lines = []
    for mistake in error.errors():
        path = ".".join(str(part) for part in mistake["loc"]) or "settings"
        message = mistake["msg"].removeprefix("Value error, ")
        found = "" if mistake["type"] in ("missing", "extra_forbidden") else f" (found {mistake['input']!r})"
        if mistake["type"] == "extra_forbidden":
            message = "there is no such setting"
        lines.append(f"  {path}: {message}{found}")
    where = f" in {file}, {others}" if file else f" in {others}"
    count = "1 mistake" if len(lines) == 1 else f"{len(lines)} mistakes"
    return f"{count} in the settings{where}:\n" + "\n".join(lines)
