"""The page of a program's settings: each with its type, range, default and meaning."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple, Union

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from docs.generate.markdown import GENERATED, NAMES, cell, table
from fairfleet.common.cli.settings import PREFIX

BOUNDS: dict[type, tuple[str, str]] = {
    Gt: ("gt", "> "),
    Ge: ("ge", "≥ "),
    Lt: ("lt", "< "),
    Le: ("le", "≤ "),
    MinLen: ("min_length", "length ≥ "),
    MaxLen: ("max_length", "length ≤ "),
}


class Section(NamedTuple):
    """A group of settings and the path that its names begin with."""

    path: str
    model: type[BaseModel]


def settings_page(settings: type[BaseModel], program: str) -> str:
    """Return the Markdown page of all settings of a program."""
    lines = [
        GENERATED,
        f"# Settings of the {program}",
        "",
        f"Give a setting in a YAML file (`--config FILE`), as a variable (`{PREFIX}NAME`, with",
        "`__` between the parts of a path), or on the command line (`--set path=value`, or its own",
        "flag). A flag wins over a variable, a variable over the file, and the file over the",
        "default.",
        "",
    ]
    for section in sections(settings):
        lines += [f"## `{section.path}`" if section.path else "## General", ""]
        if section.path and section.model.__doc__:
            lines += [section.model.__doc__.split("\n\n")[0].replace("\n", " ").strip(), ""]
        rows = list(_rows(section))
        lines += [*table(("setting", "values", "default", "meaning"), rows), ""]
    return "\n".join(lines)


def sections(model: type[BaseModel], path: str = "") -> Iterator[Section]:
    """Yield the model and the models below it, each with its path."""
    yield Section(path, model)
    for name, field in model.model_fields.items():
        if below := _model_in(field.annotation):
            yield from sections(below, f"{path}.{name}".strip("."))


def _rows(section: Section) -> Iterator[tuple[str, str, str, str]]:
    for name, field in section.model.model_fields.items():
        path = f"{section.path}.{name}".strip(".")
        below = _model_in(field.annotation)
        meaning = field.description or ""
        if below:
            anchor = path.replace(".", "").replace("_", "_")
            default = "none" if field.get_default() is None else "see there"
            yield f"`{path}`", f"[section](#{anchor})", default, cell(meaning)
        else:
            yield f"`{path}`", cell(_values(field)), cell(_default(field)), cell(meaning)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the settings section that an annotation names, if it names one with fields."""
    for kind in _alternatives(annotation):
        if isinstance(kind, type) and issubclass(kind, BaseModel) and kind.model_fields:
            return kind
    return None


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(annotation) in (Union, types.UnionType)
    return typing.get_args(annotation) if is_union else (annotation,)


def _values(field: FieldInfo) -> str:
    kinds = [_kind(kind) for kind in _alternatives(field.annotation) if kind is not type(None)]
    return ", ".join([" or ".join(kinds), *_bounds(field.metadata)])


def _kind(kind: Any) -> str:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return ", ".join([_kind(arguments[0]), *_bounds(arguments[1:])])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (tuple, list, set, frozenset):
        return f"list of {_kind(arguments[0])}"
    if origin is dict:
        return f"mapping of {_kind(arguments[0])} to {_kind(arguments[1])}"
    if kind is SecretStr:
        return "text (kept out of logs)"
    return NAMES.get(kind, getattr(kind, "__name__", str(kind)))


def _bounds(metadata: Any) -> Iterator[str]:
    for bound in metadata:
        if type(bound) in BOUNDS:
            attribute, sign = BOUNDS[type(bound)]
            yield f"{sign}{getattr(bound, attribute):g}"


def _default(field: FieldInfo) -> str:
    if field.default_factory is not None:
        return "of this machine"
    if field.default is PydanticUndefined:
        return "required"
    if field.default is None:
        return "none"
    if isinstance(field.default, bool):
        return "`true`" if field.default else "`false`"
    text = str(field.default)
    return f"`{text}`" if text and field.default not in ({}, (), []) else "none"
