"""What one run's records say, round by round: read as they are written, kept as a few numbers per round."""

from __future__ import annotations

import math
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path

import numpy as np

from fedskew.evaluation.figures import COSTS, FIGURES, leading_figure
from fedskew.evaluation.metrics import Metrics
from fedskew.evaluation.rounds import round_costs
from fedskew.experiment.live import ACCURACY, ClientFigures, Lines
from fedskew.experiment.run_directory import RECORDS
from fedskew.federation.protocol import Record, merge_late
from fedskew.report.charts import recall
from fedskew.report.outcome import VIEWS

MOST_CLASSES = 100  # with more there are no curves by class
LAST_LOST = 100  # lost updates that are listed
LOSS = "training loss"
FEW, KEPT_FIRST = 50, 2000  # records that are all kept; rounds that are kept of a long run
SHOWN_ROUNDS = 60  # columns of the heat map
KEPT_ROUNDS = 4096  # evaluated rounds whose figures by client are kept; of more, every second one is dropped


class History:
    """The curves and costs of one run. A figure is a column with one value per round, NaN where there is none."""

    def __init__(self) -> None:
        self.records, self.figures = Lines(Record), Lines(ClientFigures)
        self.clients: dict[int, ClientFigures] = {}  # by round, counted from 0
        self._clear()

    def _clear(self) -> None:
        self.rounds = array("L")  # counted from 1
        self.columns: dict[str, array[float]] = {}
        self.last: Record | None = None
        self.stride, self.kept, self.evaluated = 1, 0, 0  # see `_stride`; last round kept, last evaluated one kept
        self.leading = ""  # key of the leading figure; "": not evaluated yet
        self.costs = dict.fromkeys(COSTS, 0.0)
        self.lost: deque[tuple[int, int, str]] = deque(maxlen=LAST_LOST)  # (round from 1, client, why)
        self.reasons: Counter[str] = Counter()
        self.losers: Counter[int] = Counter()  # client -> updates of it that were lost

    def update(self, folder: Path, seconds: float) -> bool:
        """Read what is new, for about so many seconds at most. Whether all was read."""
        end = time.monotonic() + seconds
        while True:
            anew, records = self.records.read(folder / RECORDS)
            if anew:
                self._clear()
            self._add(records, self._stride(len(records), folder / RECORDS))
            if not records:
                break
            if time.monotonic() > end:
                return False
        return self._update_clients(folder / ACCURACY, end)

    def _update_clients(self, path: Path, end: float) -> bool:
        while path.is_file() and not path.is_symlink():
            anew, lines = self.figures.read(path)
            if anew:
                self.clients = {}
            self.clients |= {line.round: line for line in lines}
            if len(self.clients) > KEPT_ROUNDS:
                self.clients = dict(sorted(self.clients.items())[::-2][::-1])
            if not lines:
                break
            if time.monotonic() > end:
                return False
        return True

    def _stride(self, count: int, path: Path) -> int:
        """Of how many rounds one is kept: of a long run that is read for the first time, about `KEPT_FIRST` in all."""
        if count < FEW:
            return 1
        length = self.records.offset / (len(self.rounds) * self.stride + count)
        self.stride = max(self.stride, int(path.stat().st_size / length / KEPT_FIRST))
        return self.stride

    def _add(self, records: list[Record], stride: int) -> None:
        """Add records. The first of them may bring the clients' figures of the round before it."""
        before = [self.last] if self.last is not None else []
        merged = merge_late([*before, *records])
        for record in merged[len(before) :]:
            for key, value in round_costs(record).items():
                self.costs[key] += value
            for client, why in record.lost.items():
                self.lost.append((record.number, client, why))
                self.reasons[why] += 1
                self.losers[client] += 1
        for i, record in enumerate(merged if records else []):
            since = record.number - (self.evaluated if record.metrics is not None else self.kept)
            if i < len(before) or record is merged[-1] or since >= stride:
                self._add_figures(record)
        self.last = merged[-1] if merged else None

    def _add_figures(self, record: Record) -> None:
        if not self.rounds or self.rounds[-1] != record.number:
            self.rounds.append(record.number)
        self.kept = record.number
        loss = record.training.get("loss")
        self._put(LOSS, loss)
        if record.metrics is None:
            return
        self.evaluated = record.number
        figure = leading_figure(record.metrics)
        self.leading = figure.key if figure is not None else self.leading
        for key in {*VIEWS, self.leading} - {""}:
            self._put(key, FIGURES[key].of(record.metrics))
        classes = len(record.metrics.leading.per_class) if record.metrics.leading is not None else 0
        for c in range(classes if classes <= MOST_CLASSES else 0):
            self._put(f"class {c}", _safe(recall(c), record.metrics))

    def _put(self, key: str, value: float | None) -> None:
        """Set a figure of the last round."""
        column = self.columns.setdefault(key, array("d"))
        column.extend([math.nan] * (len(self.rounds) - len(column)))
        if value is not None:
            column[-1] = value

    @property
    def classes(self) -> int:
        """How many classes have a curve."""
        return sum(key.startswith("class ") for key in self.columns)

    def values(self, key: str, most: int, scale: float = 100) -> dict[int, float]:
        """A figure by round, at most about `most` rounds, the last one among them; {} if no round has it."""
        column = np.array(self.columns.get(key, ()))
        known = np.flatnonzero(np.isfinite(column))
        step = -(-len(known) // most) or 1
        # by place, not from the end: runs of other seeds then keep the same rounds
        kept = np.unique([*known[step - 1 :: step].tolist(), *known[-1:].tolist()]).astype(int)
        return dict(zip(np.array(self.rounds)[kept].tolist(), (scale * column[kept]).tolist(), strict=True))

    def shown_clients(self) -> list[ClientFigures]:
        """The figures by client of at most about `SHOWN_ROUNDS` rounds that have finished, in order."""
        last = self.rounds[-1] if self.rounds else 0
        known = [line for round, line in sorted(self.clients.items()) if round < last]
        step = -(-len(known) // SHOWN_ROUNDS) or 1
        return known[::-step][::-1]


def _safe(read: Callable[[Metrics], float | None], metrics: Metrics) -> float | None:
    try:
        return read(metrics)
    except IndexError:
        return None
