"""Importing torch in less time, for commands that need it."""

from __future__ import annotations

import gc
import importlib
import sys


def load_torch() -> None:
    """Import torch and what an experiment needs, without garbage collection; do nothing if torch is there already.

    Modules live as long as the process. Looking for garbage among them takes a seventh of the time of the import, and
    a fifth of it again when the process ends; frozen, they are not looked at any more.
    """
    if "torch" in sys.modules:
        return
    gc.disable()
    try:
        importlib.import_module("fedskew.experiment.run")
    finally:
        gc.freeze()
        gc.enable()
