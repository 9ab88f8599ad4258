"""Methods by name: those of this package, of installed packages, and of a user's file (`my.py:Pull`)."""

from __future__ import annotations

import dataclasses

from fedskew.core import user_code
from fedskew.core.method import Method
from fedskew.core.settings import UsageError, unknown
from fedskew.methods import REGISTRY

GROUP = "fedskew.methods"  # entry points of installed packages


def find_method(name: str) -> type[Method]:
    """The class that a name stands for, or a sentence that lists the known names."""
    if name in REGISTRY:
        return REGISTRY[name]
    if user_code.split_text(name) is not None:
        return checked_class(user_code.from_file(name, "method"), name)
    points = user_code.installed(GROUP)
    if name not in points:
        raise unknown("method", name, {**REGISTRY, **points})
    return checked_class(user_code.from_package(points[name], "method"), name)


def name_of(kind: type[Method]) -> str:
    """The name under which `find_method` finds a class; the class's own name if it is not found."""
    for name, known in REGISTRY.items():
        if known is kind:
            return name
    if text := user_code.text_of(kind):
        return text
    points = user_code.installed(GROUP)
    return next((n for n, p in points.items() if p.value == f"{kind.__module__}:{kind.__qualname__}"), kind.__name__)


def all_methods() -> dict[str, type[Method]]:
    """Every method of this package and of installed packages, by name."""
    return REGISTRY | {name: find_method(name) for name in sorted(user_code.installed(GROUP)) if name not in REGISTRY}


def checked_class(given: object, name: str) -> type[Method]:
    """`given` if it is a method's class that can be used, else a sentence."""
    if not isinstance(given, type) or not issubclass(given, Method):
        raise UsageError(f"method '{name}' is a {type(given).__name__}: expected a class that extends fedskew.Method.")
    # inherited from Method: a class that is no dataclass itself would ignore its own fields
    if "__dataclass_fields__" not in vars(given) or not given.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise UsageError(f"method '{name}' is no frozen dataclass: write @dataclass(frozen=True) above its class.")
    for field in dataclasses.fields(given):
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise UsageError(f"method '{name}': its setting {field.name} has no default, and every setting needs one.")
    return given
