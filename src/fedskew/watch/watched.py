"""One run in the list, read from its directory."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from fedskew.core.settings import UsageError
from fedskew.deploy.messages import OWN_DATA
from fedskew.evaluation.figures import leading_figure
from fedskew.experiment.given import method_from, method_table, method_text
from fedskew.experiment.live import State, last_records, seconds_left
from fedskew.experiment.run_directory import RECORDS, RESULT, SETTINGS
from fedskew.methods import REGISTRY
from fedskew.watch.entry import Entry, Row, short
from fedskew.watch.history import History

MOST_STAGES = 1_000_000  # rounds for which a method is asked for its stages
RECENT = 20  # records that the time left is computed from
MAY_DIFFER = ("method", "seed")  # settings that may differ between runs that are drawn over each other


class Ending(msgspec.Struct, frozen=True):
    """What is needed of a run's result."""

    diverged: str = ""
    stopped: str = ""
    settings: dict[str, Any] = {}


class Watched(Entry):
    """One run. `row` and `history` read what is new."""

    files, main = (RECORDS, RESULT, SETTINGS), RECORDS

    def __init__(self, path: Path, name: str) -> None:
        super().__init__(path, name)
        self.settings_seen: Any = None
        self.settings: dict[str, Any] = {}
        self.method, self.rounds = "", 0
        self.history = History()

    def _read_settings(self) -> None:
        seen = self.stamp(SETTINGS)
        if seen == self.settings_seen:
            return
        self.settings_seen = seen
        try:
            self.settings = tomllib.loads((self.read(SETTINGS, bytes) or b"").decode())
        except (ValueError, RecursionError):
            self.settings = {}
        self.method, self.rounds = described(self.settings)
        self.group = repr(sorted((key, repr(v)) for key, v in self.settings.items() if key not in MAY_DIFFER))

    @property
    def seed(self) -> str:
        """The seed as text."""
        return short(self.settings.get("seed", 0))

    def _row(self, locked: bool) -> Row:
        self._read_settings()
        records, recent = self.stamp(RECORDS), []
        if records is not None:
            try:
                recent = last_records(self.path / RECORDS, RECENT)
            except OSError:
                records = None
        state, why = self._state(locked)
        written = records[1] / 1e9 if records else 0.0
        left = seconds_left(self.rounds, recent) if state == "running" else None
        # between sites, the figures of the last round are still to come
        evaluated = [m for record in recent if (m := record.metrics) is not None and leading_figure(m) is not None]
        figure = leading_figure(evaluated[-1]) if evaluated else None
        value = f"{figure.text(figure.of(evaluated[-1]))} {figure.unit}".strip() if figure else ""
        data = short(str(self.settings.get("data", "")).rpartition("/")[2])
        return Row(
            id=self.id,
            name=self.name,
            title=f"{self.method} on {self._samples(data)}",
            method=self.method,
            data=data,
            seed=self.seed,
            state=state,
            why=why,
            round=recent[-1].number if recent else 0,
            rounds=self.rounds,
            unit="",
            now="",
            ends=round(written + left, 1) if left is not None and math.isfinite(left) else None,
            figure=f"{figure.words.partition(':')[0]}: {figure.measure}" if figure else "",
            value=value,
            written=written,
        )

    def _samples(self, data: str) -> str:
        """What it trains on, in words. Sites with their own data have no split."""
        return "the sites' own data" if data == OWN_DATA else f"{data}, {short(self.settings.get('split', ''))}"

    def _state(self, locked: bool) -> tuple[State, str]:
        """The state, and why it failed or ended early."""
        if self.stamp(RESULT):
            ending = self.read(RESULT, Ending) or Ending()
            warned = ending.settings.get("on_divergence") == "warn"
            if ending.diverged and not warned:
                return "failed", ending.diverged
            return "finished", ending.stopped or ending.diverged
        return self._unfinished(locked)


def described(settings: dict[str, Any]) -> tuple[str, int]:
    """(the method in words, the number of rounds) of settings as plain values; 0 rounds if that is not known.

    Only methods of fedskew itself are built: the name of another one may be that of a file of code.
    """
    table = settings.get("method", {})
    try:
        table = method_table(table) if isinstance(table, str) else dict(table)
    except (UsageError, TypeError, ValueError):
        table = {}
    name = str(table.get("name", "fedavg"))
    rounds = settings.get("rounds", 0)
    rounds = rounds if isinstance(rounds, int) and rounds > 0 else 0
    if name not in REGISTRY:
        own = ",".join(f"{key}={value}" for key, value in table.items() if key != "name")
        return short(f"{name}:{own}" if own else name), rounds
    try:
        method = method_from(table)
    except UsageError:
        return short(name), rounds
    return short(method_text(method)), len(method.stages(rounds)) if rounds <= MOST_STAGES else rounds
