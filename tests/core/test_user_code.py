"""Classes and functions of a user's file or of an installed package, by name."""

from __future__ import annotations

import pickle
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from fedskew.core import user_code
from fedskew.core.settings import UsageError
from fedskew.experiment.given import method_of
from fedskew.methods import _find
from fedskew.methods.fedprox import FedProx
from helpers.own_code import MY


def test_a_method_of_a_file_is_built_with_its_options(own_folder: Path) -> None:
    method: Any = method_of("my.py:Pull:mu=0.3")
    assert (type(method).__name__, method.mu) == ("Pull", 0.3)
    assert method_of("my.py:Pull") == method_of(f"{own_folder}/my.py:Pull")


def test_its_name_is_the_file_relative_to_the_folder(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = _find.find_method("my.py:Pull")
    assert _find.name_of(kind) == "my.py:Pull"
    (own_folder / "below").mkdir()
    monkeypatch.chdir(own_folder / "below")
    assert _find.name_of(kind) == f"{own_folder.resolve()}/my.py:Pull"


@pytest.mark.slow  # starts a process
def test_an_object_of_a_file_is_found_again_in_another_process(own_folder: Path) -> None:
    """What a worker does: unpickle before anything else was imported."""
    (own_folder / "method.pickle").write_bytes(pickle.dumps(method_of("my.py:Pull:mu=0.3")))
    code = "import pickle; print(pickle.load(open('method.pickle', 'rb')))"
    done = subprocess.run([sys.executable, "-c", code], cwd=own_folder, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "Pull(mu=0.3)"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("no.py:Pull", "there is no file no.py"),
        ("my.py:Push", "has no 'Push'. It defines"),
        ("my.py:no_method", "is a int: expected a class that extends fedskew.Method"),
        ("my.py:net", "expected a class that extends fedskew.Method"),
        ("my.py:Loose", "is no frozen dataclass"),
        ("my.py:Pull:nu=1", "unknown setting of method my.py:Pull 'nu'"),
        ("broken.py:Pull", "cannot be imported: SyntaxError"),
        ("raises.py:Pull", "cannot be imported: ZeroDivisionError"),
    ],
)
def test_mistakes_are_one_sentence(own_folder: Path, text: str, words: str) -> None:
    (own_folder / "broken.py").write_text("def f(:\n")
    (own_folder / "raises.py").write_text("1 / 0\n")
    with pytest.raises(UsageError, match=r".*") as caught:
        method_of(text)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_installed_packages_offer_methods_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("theirs", "fedskew.methods.fedprox:FedProx", "fedskew.methods")
    broken = EntryPoint("broken", "no_such_package:Method", "fedskew.methods")
    monkeypatch.setattr(user_code, "entry_points", lambda group: [point, broken])
    assert method_of("theirs:mu=0.5") == FedProx(mu=0.5)
    with pytest.raises(UsageError, match="'broken' of the package no_such_package:Method cannot be imported"):
        method_of("broken")
    with pytest.raises(UsageError, match="did you mean 'theirs'"):
        method_of("their")


def test_the_hash_is_that_of_the_source_file(own_folder: Path) -> None:
    kind = _find.find_method("my.py:Pull")
    before = user_code.source_hash(kind)
    (own_folder / "my.py").write_text(MY + "# changed\n")
    assert len(before) == 64
    assert user_code.source_hash(kind) != before
