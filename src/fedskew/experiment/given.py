"""What a user may give for a method, a data set or a model, as an object or as text, and the errors of the rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import nn

from fedskew.core.method import Method
from fedskew.core.settings import UsageError, build, checked, parse
from fedskew.core.user_code import split_text
from fedskew.data.dataset import DataSet
from fedskew.methods import REGISTRY
from fedskew.methods._find import find_method, name_of


def method_table(text: str) -> dict[str, Any]:
    """The table of settings that a method's text form stands for.

    >>> method_table("fedprox:mu=0.1")
    {'name': 'fedprox', 'mu': '0.1'}
    >>> method_table("my.py:Pull:mu=0.1")
    {'name': 'my.py:Pull', 'mu': '0.1'}
    """
    if (found := split_text(text)) is not None:
        name, rest = found
        return method_table(f"own:{rest}") | {"name": name}
    steps = parse(text, "method")
    if len(steps) > 1:
        raise UsageError(f"method '{text}' is invalid: expected one method, as in name:field=value,...")
    name, options = steps[0]
    return {"name": name} | {key: _numbers(value) for key, value in options.items()}


def method_of(text: str) -> Method:
    """A method from its text form: `fedprox:mu=0.1` gives FedProx(mu=0.1)."""
    return method_from(method_table(text))


def method_from(table: Mapping[str, Any]) -> Method:
    """A method from its table of settings; without a name it is FedAvg."""
    values = dict(table)
    name = str(values.pop("name", "fedavg"))
    kind = find_method(name)
    for key in values:
        if key not in {f.name for f in dataclasses.fields(kind)} and (others := _methods_with(key)):
            raise UsageError(f"method {name} has no setting '{key}'; add --method with one that has it: {others}.")
    return build(kind, values, f"method {name}")


def _methods_with(key: str) -> str:
    """The names of the methods that have a setting of this name."""
    return ", ".join(name for name, kind in REGISTRY.items() if key in {f.name for f in dataclasses.fields(kind)})


def method_text(method: Method) -> str:
    """A method's text form: its name with the settings that are not its defaults, `fedprox:mu=0.5`."""
    name = name_of(type(method))
    fields = {f.name: getattr(method, f.name) for f in dataclasses.fields(method)}
    changed = [
        f"{f.name}={_plain_text(fields[f.name])}" for f in dataclasses.fields(method) if fields[f.name] != f.default
    ]
    return name + (":" + ",".join(changed) if changed else "")


def _plain_text(value: Any) -> str:
    """A setting's value in a text form; the inverse of `_numbers`."""
    return "-".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def as_method(given: object) -> Method:
    """A method from what a user gave: a method, or its text form. Anything else raises UsageError."""
    if isinstance(given, str):
        return method_of(given)
    if isinstance(given, type):
        raise UsageError(f"method={given.__name__} is a class: expected a method, as in {given.__name__}().")
    if not isinstance(given, Method):
        raise UsageError(f"method={given!r} is invalid: expected a method, as in fedskew.FedAvg() or 'fedprox:mu=0.1'.")
    return checked(given, f"method {name_of(type(given))}")


def check_data(what: str, given: object) -> None:
    """Raise UsageError unless `given` is a data set, or the name or path of one."""
    if isinstance(given, str):
        return
    if not isinstance(given, DataSet):
        raise UsageError(
            f"{what} is a {type(given).__name__}: expected a name, a path or a DataSet; fedskew.from_dataset makes one "
            "of any torch data set, as in from_dataset(TensorDataset(x, y))."
        )
    if problem := given.problem():
        raise UsageError(f"{what}: {problem}.")


def check_model(given: object) -> None:
    """Raise UsageError unless `given` is a net, or the name of one."""
    if isinstance(given, type):
        raise UsageError(f"model={given.__name__} is a class: expected a net, as in {given.__name__}().")
    if not isinstance(given, str | nn.Module):
        raise UsageError(f"model is a {type(given).__name__}: expected the name of a net, or a torch module.")


def _numbers(value: str) -> Any:
    """5-5-5 as a list of numbers, since a comma ends an option; other text unchanged."""
    parts = value.split("-")
    return [int(p) for p in parts] if len(parts) > 1 and all(p.isdigit() for p in parts) else value
