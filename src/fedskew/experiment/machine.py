"""Where a run is computed: how many worker processes, and on which device."""

from __future__ import annotations

import torch

from fedskew.core.settings import UsageError, choose
from fedskew.federation.simulate.simulation import Engine
from fedskew.federation.simulate.worker import cores


def worker_count(given: int | None, engine: Engine) -> tuple[int | None, list[str]]:
    """(number of worker processes, messages for the user): `given`, but not more than there are cores.

    More processes than cores compute no faster, and each takes seconds to start. None, for all cores, stays None. The
    engine "ray" has the cores of a cluster, so its number stays as it is.
    """
    choose("engine", engine, {"processes": 1, "ray": 1})
    if given is None:
        return None, []
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise UsageError(f"workers={given!r} is invalid: expected a number of processes of at least 1, or None.")
    most = cores()
    if engine == "ray" or given <= most:
        return given, []
    return most, [f"{given} workers are more than the {most} cores of this machine: {most} are used"]


def pick_device(name: str) -> str:
    """A device that is available; `auto` is the first of cuda, mps and cpu."""
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        return next(device for device in ("cuda", "mps", "cpu") if available[device])
    if not available.get(name, False):
        usable = ", ".join(device for device, is_available in available.items() if is_available)
        raise UsageError(f"device {name} is not available: expected auto, {usable}.")
    return name
