"""The runs that claims of the papers rest on: planned in a TOML file, made one after the other, kept as cells.

A run has a directory of its own, so it goes on where it was interrupted. What is kept already is not run again.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from fedskew.core.settings import UsageError
from fedskew.experiment.config import read_toml
from fedskew.experiment.run_directory import read_run
from fedskew.studies.papers import cell_of, write_cell
from fedskew.studies.provenance import this_commit, this_cpu


class Group(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Runs that differ by method and seed."""

    name: str  # of each run, with {method} and {seed}
    config: str  # TOML file of the experiment
    methods: dict[str, str]  # as in the name -> as for `fedskew run --method`
    seeds: list[int]
    options: str = ""  # further options of `fedskew run`


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All runs, in the order in which they are made."""

    runs: list[Group]


def read_plan(path: Path) -> dict[str, str]:
    """Name of each run -> the command that makes it, in the order of the plan: seed by seed, all methods of a group."""
    try:
        plan = msgspec.convert(read_toml(path), Plan)
    except msgspec.ValidationError as error:
        raise UsageError(f"{path} is not a plan of runs: {error}.") from None
    commands: dict[str, str] = {}
    for group in plan.runs:
        for seed in group.seeds:
            for key, method in group.methods.items():
                name = group.name.format(method=key, seed=seed)
                if name in commands:
                    raise UsageError(f"{path} has two runs called {name}.")
                parts = [f"fedskew run --config {group.config} --method {method}", group.options]
                parts += [f"--seed {seed}" if seed else "", "--workers 1"]
                commands[name] = " ".join(part for part in parts if part)
    return commands


def make_runs(
    plan: Path, cells: Path, out: Path, *, words: Sequence[str] = (), say: Callable[[str], None] = print
) -> list[str]:
    """Make the planned runs that are not kept in `cells` yet; returns the names of those made.

    Args:
        plan: the TOML file.
        cells: folder of the kept runs.
        out: folder of the run directories.
        words: only runs whose name holds one of these; (): all.
        say: called with a line before and after each run.
    """
    commands = read_plan(plan)
    chosen = [name for name in commands if not words or any(word in name for word in words)]
    if not chosen:
        raise UsageError(f"{plan} has no run whose name holds {' or '.join(words)}.")
    made = []
    for name in chosen:
        if (cells / f"{name}.json").exists():
            continue
        say(f"{name}: {commands[name]}")
        carry_out(commands[name], out / name)
        cell = cell_of(out / name, name=name, command=commands[name], commit=this_commit(), cpu=this_cpu())
        write_cell(cell, cells)
        say(f"{name}: {cell.seconds / 60:.1f} minutes, digest {cell.digest[:16]}")
        made.append(name)
    return made


def carry_out(command: str, directory: Path) -> None:
    """Run or resume a command in a process of its own, so that Ctrl-C ends it after a checkpoint."""
    if directory.exists():
        if read_run(directory).result is not None:
            return
        arguments = ["run", "--resume", str(directory), "--workers", "1"]
    else:
        arguments = [*shlex.split(command)[1:], "--out", str(directory)]
    done = subprocess.run([sys.executable, "-m", "fedskew", *arguments], check=False, stdout=subprocess.DEVNULL)
    if done.returncode:
        raise UsageError(f"{directory.name} ended with exit code {done.returncode}; the same command resumes it.")
