"""Dataclasses as JSON and back, by their annotations: what a session keeps on disk has types in the program."""

import dataclasses
import reprlib
import types
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def to_json(value: Any) -> Any:  # noqa: ANN401 - whatever a field may hold
    """Return a value as JSON has it: a dataclass as an object, a tuple as an array, a path as text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple | frozenset):
        return [to_json(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def from_json(kind: type[T], value: Any) -> T:  # noqa: ANN401 - anything that JSON can say
    """Return what `to_json` was given, of a kind; missing fields have their defaults, unknown ones are ignored.

    Raises:
        TypeError, ValueError: if it cannot be one.
    """
    made: T = _read(kind, value)
    return made


@cache
def _fields(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    names = kind._fields if hasattr(kind, "_fields") else [field.name for field in dataclasses.fields(kind)]
    return {name: hints[name] for name in names}


def _read(kind: Any, value: Any) -> Any:  # noqa: ANN401, PLR0911 - one return a kind of annotation
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        rest = [argument for argument in arguments if argument is not types.NoneType]
        return None if value is None else _read(rest[0], value)
    if origin is frozenset:
        return frozenset(_read(arguments[0], item) for item in value)
    if origin in (tuple, list):
        kinds = arguments if len(arguments) == len(value) and ... not in arguments else arguments[:1] * len(value)
        return origin(_read(inner, item) for inner, item in zip(kinds, value, strict=True))
    if origin in (dict, Mapping):
        return {str(key): _read(arguments[1], item) for key, item in value.items()}
    if hasattr(kind, "_fields"):  # a named tuple
        kinds = tuple(_fields(kind).values())[: len(value)]
        return kind(*(_read(inner, item) for inner, item in zip(kinds, value, strict=True)))
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = _fields(kind)
        return kind(**{name: _read(hints[name], item) for name, item in value.items() if name in hints})
    if kind is Path:
        return Path(value)
    if kind is float and type(value) is int:
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise TypeError(f"{reprlib.repr(value)} is no {kind.__name__}")
    return value
