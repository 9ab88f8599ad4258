"""Commands that are proposed at the end of another command."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from fedskew.experiment.config import Experiment


def print_next(experiment: Experiment, path: Path | None, data_dir: Path | None, screen: Console) -> None:
    """Two commands that continue from this run, on the same clients: look at the split, run another method."""
    where = ["--data-dir", str(data_dir)] if data_dir is not None else []
    data = ["--data", str(experiment.data)] if experiment.data != "digits" else []
    seed = ["--seed", str(experiment.seed)] if experiment.seed else []
    other = "fedavg" if experiment.method_name == "fedprox" else "fedprox"
    split = ["fedskew", "split", experiment.split, *data, *seed, *where, "--png", "split.png"]
    run = ["fedskew", "run", "--config", f"{path}/settings.toml", "--method", other, *where]
    screen.print()
    for lead, words, what in (("next:", split, "see how skewed they are"), ("     ", run, "another method")):
        screen.print(f"{lead} {shlex.join(words)}    {what}", markup=False, soft_wrap=True)
