"""Reading settings: flags win over FAIRFLEET_* variables, over a YAML file, over defaults.

Each program has one frozen settings object. All mistakes in it are reported at once, each with the
path of its setting.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, SecretStr, ValidationError
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from fairfleet.common.cli.suggestions import did_you_mean, how_to_give
from fairfleet.common.errors import BadSettings, UsageError, short

PREFIX = "FAIRFLEET_"
MAX_VALUE_CHARS = 200  # of a wrong value in a message
# A setting with one of these in its name may hold a secret, whatever its type.
SECRET_WORDS = ("password", "passwd", "secret", "token", "database")
# ValueError is for bytes that are not UTF-8, and for a date such as 2024-13-01.
IPV6_ADDRESS = re.compile(r"\[[0-9A-Fa-f:.%]+\]:[0-9]+")  # with a port
NOT_YAML = (yaml.YAMLError, ValueError)


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
        """Use only the values that are passed in: `read_settings` has merged the other sources."""
        return (init_settings,)


S = TypeVar("S", bound=Settings)
M = TypeVar("M", bound=BaseModel)


def read_settings(kind: type[S], file: Path | None, flags: dict[str, Any]) -> S:
    """Return a program's settings from flags, environment, file and defaults.

    `flags` holds what the command line gives; keys may be dotted paths (`plan.learning_rate`).
    Raises BadSettings, which lists every mistake.
    """
    values = _read_yaml(file) if file else {}
    try:
        _merge(values, EnvSettingsSource(kind)())
    except SettingsError as error:
        raise BadSettings(
            f'{error}. In a variable, a list is JSON: {PREFIX}WHEN=\'["mains", "idle"]\''
        ) from None
    _merge(values, _nested(flags))
    try:
        return kind(**InitSettingsSource(kind, values)())
    except ValidationError as error:
        raise BadSettings(_explain(error, kind, file, f"{PREFIX}* or flags")) from None


def read_model(kind: type[M], file: Path | None, flags: dict[str, Any]) -> M:
    """Return a description (of an experiment, for example) from flags, file and defaults.

    Unlike `read_settings`, it ignores the environment.
    """
    values = _read_yaml(file) if file else {}
    _merge(values, _nested(flags))
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise BadSettings(_explain(error, kind, file, "flags")) from None


def given_flags(flags: dict[str, Any], assignments: Iterable[str] | None = ()) -> dict[str, Any]:
    """Return the flags that have a value, and what `--set path=value` adds to them."""
    given = {path: value for path, value in flags.items() if value is not None}
    return given | dict(map(parse_assignment, assignments or ()))


def parse_assignment(text: str) -> tuple[str, Any]:
    """Return path and value of `--set path=value`.

    Lists, mappings, null and quoted text are read as YAML. A number, a boolean or a date stays
    text, which the type of the setting converts: a name or a token may consist of digits.

    Raises UsageError without an equals sign, and BadSettings for a value that is not YAML.
    """
    path, equals, value = text.partition("=")
    if not equals:
        raise UsageError(
            f"--set {text!r} is not of the form path=value, for example plan.learning_rate=0.05"
        )
    if IPV6_ADDRESS.fullmatch(value):
        return path, value  # YAML would read the brackets as a list
    try:
        parsed = yaml.safe_load(value)
    except NOT_YAML as error:
        raise BadSettings(f"--set {text!r}: the value is not YAML: {error}") from None
    is_yaml = parsed is None or isinstance(parsed, str | list | dict)
    return path, parsed if is_yaml else value


def default_text(kind: type[BaseModel], path: str) -> str:
    """Return the default of a setting as `--help` shows it; `path` may be dotted."""
    name, *parts = path.split(".")
    default = kind.model_fields[name].get_default(call_default_factory=True)
    for part in parts:
        default = getattr(default, part)
    return "none" if default is None else str(default)


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
        raise BadSettings(f"{file} is not YAML: {_yaml_mistake(error)}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise BadSettings(f"{file} must hold a mapping of settings, found {type(values).__name__}")
    return values


def _yaml_mistake(error: Exception) -> str:
    """Return what is wrong and where, without the lines around it: they may hold secrets."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return str(error)
    problem = getattr(error, "problem", None) or "it cannot be read"
    return f"{problem} in line {mark.line + 1}, column {mark.column + 1}"


def _explain(error: ValidationError, kind: type[BaseModel], file: Path | None, sources: str) -> str:
    lines = [_explain_mistake(m, kind) + _remedy(m, kind) for m in error.errors()]
    where = f" in {file}, {sources}" if file else f" in {sources}"
    count = "1 mistake" if len(lines) == 1 else f"{len(lines)} mistakes"
    return f"{count} in the settings{where}:\n" + "\n".join(lines)


def _remedy(mistake: Any, kind: type[BaseModel]) -> str:
    match mistake["type"]:
        case "extra_forbidden":
            return did_you_mean(kind, mistake["loc"])
        case "missing":
            return how_to_give(kind, mistake["loc"])
    return ""


def _explain_mistake(mistake: Any, kind: type[BaseModel]) -> str:
    path = ".".join(str(part) for part in mistake["loc"]) or "settings"
    if mistake["type"] == "extra_forbidden":
        return f"  {path}: there is no such setting"
    message = mistake["msg"].removeprefix("Value error, ")
    value = _shown_value(mistake["input"])
    if mistake["type"] == "missing" or value is None or _is_secret(kind, mistake["loc"]):
        return f"  {path}: {message}"
    return f"  {path}: {message} (found {value})"


def _shown_value(value: Any) -> str | None:
    """Return a single value as text; None for sections and lists, which may hold secrets."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case int() | float():
            return str(value)
        case str() | Path():
            return f"'{short(value, MAX_VALUE_CHARS)}'"
        case _:
            return None


def _is_secret(kind: type[BaseModel], path: tuple[int | str, ...]) -> bool:
    """Return whether the value at a path must not be shown, by its type or by its name."""
    if any(word in str(part).lower() for part in path for word in SECRET_WORDS):
        return True
    section: Any = kind
    for part in path:
        fields = getattr(section, "model_fields", {})
        if part not in fields:
            return False
        types = _types_of(fields[part].annotation)
        if SecretStr in types:
            return True
        section = next((type_ for type_ in types if hasattr(type_, "model_fields")), None)
    return False


def _types_of(annotation: Any) -> set[Any]:
    """Return the types of which an annotation such as `SecretStr | None` consists."""
    parts = get_args(annotation)
    return set[Any]().union(*map(_types_of, parts)) if parts else {annotation}
