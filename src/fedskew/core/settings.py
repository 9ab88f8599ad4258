"""Settings from text: `name:key=value,...`, TOML tables, `--set`. The border where mistakes are caught.

Every setting is a field of a frozen dataclass; its type (with `Annotated[..., Meta(...)]` bounds)
is the check. What does not fit becomes a `UsageError`: one sentence, the nearest valid choice, exit 2.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

T = TypeVar("T")
LIMITS = {"ge": "of at least", "gt": "above", "le": "of at most", "lt": "below", "multiple_of": "a multiple of"}


def setting(default: T, *, help: str, source: str = "", search: tuple[float, float] | None = None) -> T:
    """A dataclass field that documents itself. Use it where a plain default would stand.

    `help` says what the setting means, and what 0 or None does. `source` says where the default comes from, such as
    "the paper". `search` is the range, low to high, in which `fedskew tune` tries values on a logarithmic scale;
    None leaves the setting at its default. All three are kept in the field's `metadata`. Bounds belong to the type.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Prox:
    ...     mu: float = setting(0.01, help="Weight of the pull; 0 gives FedAvg.", source="the paper", search=(0.001, 1))
    >>> Prox(), Prox(mu=0.5)
    (Prox(mu=0.01), Prox(mu=0.5))
    >>> (field,) = dataclasses.fields(Prox)
    >>> field.default, field.metadata["source"]
    (0.01, 'the paper')
    """
    metadata = {"help": help, "source": source, "search": search}
    return dataclasses.field(default=default, metadata=metadata)  # typed as its default, so mypy checks the annotation


class UsageError(ValueError):
    """A user's mistake, in one sentence: what was given and what is expected."""


def path_of(given: object, what: str) -> Path:
    """A path from text or a path; anything else, and empty text, is a `UsageError`. `what` names it there."""
    if not isinstance(given, str | os.PathLike) or not os.fspath(given):
        raise UsageError(f"{what}={given!r} is invalid: expected a path.")
    return Path(os.fspath(given))


def unknown(kind: str, given: str, known: Iterable[str]) -> UsageError:
    """The sentence for a name that is not there: `unknown split 'iidd'; did you mean 'iid'? ...`"""
    names = sorted(known)
    near = difflib.get_close_matches(str(given), names, n=1, cutoff=0.5)
    hint = f"; did you mean '{near[0]}'?" if near else ";"
    return UsageError(f"unknown {kind} '{given}'{hint} Known: {', '.join(names) or 'none'}.")


def choose(kind: str, given: str, known: Mapping[str, T]) -> T:
    """The entry of a registry, or the `unknown` sentence."""
    if given not in known:
        raise unknown(kind, given, known)
    return known[given]


def build(kind: type[T], values: Mapping[str, Any], what: str) -> T:
    """A frozen dataclass from plain values (numbers may be text). Raises `UsageError`."""
    fields = {f.name for f in dataclasses.fields(kind) if f.init}  # type: ignore[arg-type]
    for key in values:
        if key not in fields:
            raise unknown(f"setting of {what}", key, fields)
    required = [f.name for f in dataclasses.fields(kind) if f.init and f.default is f.default_factory]  # type: ignore[arg-type]
    for name in required:
        if name not in values:
            raise UsageError(f"{what} needs {name}=..., which was not given.")
    try:
        return msgspec.convert(dict(values), kind, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(_sentence(kind, values, what, str(error))) from None


def checked(given: T, what: str) -> T:
    """A dataclass made in Python, checked as `build` checks plain values. Raises `UsageError`.

    Numbers of numpy become Python's. Fields whose types are not plain values, as a user's own method may have, are not
    checked. `what` names the dataclass in an error.
    """
    try:
        hints = _hints(type(given))  # type: ignore[arg-type]  # mypy: a type is not Hashable
    except NameError:  # a class made inside a function may name types that only that function knows
        return given
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(given):  # type: ignore[arg-type]
        value = getattr(given, field.name)
        if type(value).__module__ == "numpy" and hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
            value = changed[field.name] = value.item()
        try:
            msgspec.convert(value, hints[field.name])
        except msgspec.ValidationError as error:
            text = f"{error} - at `$.{field.name}`"
            raise UsageError(_sentence(type(given), {field.name: value}, what, text)) from None
        except TypeError:  # not a type of plain values
            continue
    return dataclasses.replace(given, **changed) if changed else given  # type: ignore[type-var]


@cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    """The types of a dataclass's fields. Reading them takes milliseconds, and a recipe has hundreds of experiments."""
    return get_type_hints(kind, include_extras=True)


def _sentence(kind: type, values: Mapping[str, Any], what: str, error: str) -> str:
    problem, _, where = error.partition(" - at `$")
    key = re.match(r"\.(\w+)", where)
    if key is None:  # raised by __post_init__, which speaks for itself
        return problem if what in problem else f"{what}: {problem}"
    name = key.group(1)
    hint = _hints(kind)[name]
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    choices = [c for option in options if get_origin(option) is Literal for c in get_args(option)]
    expected = [number for number in map(_number, options) if number]
    if choices:
        expected.append(f"one of {', '.join(map(str, choices))}")
    if not expected:  # msgspec's own words
        expected = [re.sub(r", got `\w+`", "", problem).replace("`", "").removeprefix("Expected ")]
    return f"{what}: {name}={values[name]!r} is invalid: expected {' or '.join(expected)}."


def _number(option: Any) -> str:
    """A number's type in words, with its limits: "a number above 0"; "" for other types."""
    base, *more = get_args(option) if get_origin(option) is Annotated else (option,)
    if base not in (int, float):
        return ""
    found = {key: getattr(meta, key, None) for meta in more for key in LIMITS}
    limits = " and ".join(
        f"{LIMITS[key]} {value if base is int else format(value, 'g')}"
        for key, value in found.items()
        if value is not None
    )
    return f"{'a whole number' if base is int else 'a number'} {limits}".strip()


def parse(text: str, kind: str) -> list[tuple[str, dict[str, str]]]:
    """`a:x=1,y=2+b:z=3` -> [("a", {"x": "1", "y": "2"}), ("b", {"z": "3"})]."""
    steps = []
    for part in text.split("+"):
        name, _, rest = part.strip().partition(":")
        options: dict[str, str] = {}
        for pair in filter(None, (piece.strip() for piece in rest.split(","))):
            key, equals, value = (piece.strip() for piece in pair.partition("="))
            if not equals or not key or not value:
                raise UsageError(f"{kind} '{part.strip()}' has '{pair}' where key=value was expected.")
            if key in options:
                raise UsageError(f"{kind} '{part.strip()}' gives {key} twice.")
            options[key] = value
        if not name:
            raise UsageError(f"{kind} '{text}' has an empty part; write name:key=value,...+name:key=value,...")
        steps.append((name, options))
    return steps


def library(name: str, extra: str) -> Any:
    """An optional package, or the sentence that says how to get it."""
    try:
        return import_module(name)
    except ImportError:
        raise UsageError(f"this needs the package {name}: pip install 'fedskew[{extra}]'.") from None
