"""Importing torch without garbage collection."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from fedskew.cli.quick_start import load_torch


@pytest.mark.slow
def test_collection_is_on_again_after_torch_was_imported() -> None:
    code = (
        "import gc, sys; from fedskew.cli.quick_start import load_torch; load_torch(); "
        "assert 'torch' in sys.modules and gc.isenabled() and gc.get_freeze_count() > 10_000"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_where_torch_is_there_already_nothing_is_frozen() -> None:
    before = gc.get_freeze_count()
    load_torch()
    assert (gc.get_freeze_count(), gc.isenabled()) == (before, True)


def test_collection_is_on_again_after_an_import_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fedskew.experiment.run", None)
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(gc, "freeze", lambda: None)
    with pytest.raises(ImportError):
        load_torch()
    assert gc.isenabled()
