"""A user's own classes and functions, named on the command line or in TOML: `my.py:Pull`, or an installed package's.

A file is imported as a submodule of this one, under a name that says where the file is. So an object of it can be
pickled and is found again in a worker process, which imports the same file.

Only names come from outside; code never does. What may be imported is what the user of this machine named or installed.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import re
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from fedskew.core.settings import UsageError

__path__: list[str] = []  # files are imported as submodules; see `Files`

TEXT = re.compile(r"(?P<file>.+\.py):(?P<name>[A-Za-z_]\w*)(?::(?P<options>.*))?", re.DOTALL)
FILE = "file_"  # a submodule's name: this, and the path in hexadecimal


class Files(importlib.abc.MetaPathFinder):
    """Finds the submodules of this module: each is a file of the user's."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        start = f"{__name__}.{FILE}"
        if not fullname.startswith(start):
            return None
        return importlib.util.spec_from_file_location(fullname, bytes.fromhex(fullname.removeprefix(start)).decode())


sys.meta_path.append(Files())


def split_text(text: str) -> tuple[str, str] | None:
    """(file:name, options) of a text that names something in a file, or None if it does not.

    >>> split_text("my.py:Pull:mu=0.1")
    ('my.py:Pull', 'mu=0.1')
    >>> split_text("fedprox:mu=0.1")
    """
    match = TEXT.fullmatch(text.strip())
    return None if match is None else (f"{match['file']}:{match['name']}", match["options"] or "")


def from_file(text: str, what: str) -> Any:
    """The object that `file.py:name` names. `what` is what the user wanted, such as "method", for errors."""
    match = TEXT.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{what} '{text}' is invalid: expected file.py:name.")
    path = Path(match["file"]).expanduser().resolve()
    if not path.is_file():
        raise UsageError(f"{what} '{text}': there is no file {match['file']}.")
    try:
        module = importlib.import_module(f"{__name__}.{FILE}{str(path).encode().hex()}")
    except Exception as error:  # the file is the user's: it may raise anything
        problem = str(error).strip().partition("\n")[0].rstrip(".")
        raise UsageError(
            f"{what} '{text}': {match['file']} cannot be imported: {type(error).__name__}: {problem}."
        ) from error
    return member(module, match["name"], f"{what} '{text}'", match["file"])


def member(module: ModuleType, name: str, what: str, where: str) -> Any:
    """`module.name`, or a sentence with the names that are there."""
    if not hasattr(module, name):
        known = sorted(
            key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__
        )
        raise UsageError(f"{what}: {where} has no '{name}'. It defines {', '.join(known) or 'nothing'}.")
    return getattr(module, name)


def installed(group: str) -> dict[str, EntryPoint]:
    """What installed packages offer under an entry point group, such as "fedskew.methods", by name."""
    return {point.name: point for point in entry_points(group=group)}


def from_package(point: EntryPoint, what: str) -> Any:
    """The object of an entry point; a package that cannot be imported raises UsageError."""
    try:
        return point.load()
    except Exception as error:  # the package is somebody else's
        problem = str(error).strip().partition("\n")[0].rstrip(".")
        raise UsageError(
            f"{what} '{point.name}' of the package {point.value} cannot be imported: {problem}."
        ) from error


def text_of(thing: Any) -> str:
    """`file.py:name` of a class or function that came from a file, "" for any other. Relative if below this folder."""
    module = getattr(thing, "__module__", "")
    if not module.startswith(f"{__name__}.{FILE}"):
        return ""
    path = Path(bytes.fromhex(module.removeprefix(f"{__name__}.{FILE}")).decode())
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{shown}:{thing.__qualname__}"


def source_hash(thing: Any) -> str:
    """SHA-256 of the source file that defines a class or function; "" if there is none."""
    try:
        return hashlib.sha256(Path(inspect.getfile(thing)).read_bytes()).hexdigest()
    except (OSError, TypeError):
        return ""
