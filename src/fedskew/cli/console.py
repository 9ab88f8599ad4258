"""What all commands print with: a screen, tables, progress, one JSON object, and how a command ends early."""

from __future__ import annotations

import errno
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from fedskew.evaluation.figures import leading_figure

if TYPE_CHECKING:
    from fedskew.experiment.base_run import BaseRun
    from fedskew.federation.protocol import Record

PAGE = 400  # columns if the output is not a terminal: wide enough that tables need not be folded
NAME = 40  # letters of a table's first column that are not folded
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
NO_ACCESS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG)
REMEDY = "Resuming would only diverge again; start again with a smaller training.lr, or with training.clip."
INTERVAL = 5.0  # seconds between lines of progress if the output is not a terminal


def make_screen(as_json: bool) -> Console:
    """Where text for people goes: stdout, or stderr if stdout is for the JSON object."""
    terminal = (sys.stderr if as_json else sys.stdout).isatty()
    return Console(stderr=as_json, highlight=False, width=None if terminal else PAGE)


def print_json(value: Any) -> None:
    """Print one JSON object on stdout."""
    print(msgspec.json.encode(value).decode())  # a number that is not finite is null


def exit_with(sentence: str, code: int) -> NoReturn:
    """End the command with one sentence on stderr.

    Codes: 2 a usage error, 3 a lost quorum or divergence, 4 a disk that is full, 130 interrupted.
    """
    print(f"fedskew: {sentence}", file=sys.stderr)
    raise SystemExit(code) from None


@contextmanager
def resumable(command: str) -> Iterator[None]:
    """End the command with code 130 on Ctrl-C, 3 on a lost quorum, 4 on a full disk; say that `command` resumes it.

    It is 3, too, if the run diverged; resuming does not help then.
    """
    from fedskew.federation.protocol import Diverged, QuorumLost

    try:
        yield
    except KeyboardInterrupt:
        exit_with(f"stopped; resume with: {command}", 130)
    except Diverged as lost:
        exit_with(f"{lost}. {REMEDY}", 3)
    except QuorumLost as lost:
        exit_with(f"{lost}. Nothing is lost; resume with: {command}", 3)
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        exit_with(f"{disk_full(error)}. Free some space, then resume with: {command}", 4)


def disk_full(error: OSError) -> str:
    """The sentence for an error of `DISK_FULL`, without its full stop."""
    where = f" (while writing {error.filename})" if error.filename else ""
    return f"the disk is full: {error.strerror}{where}"


def end_if_diverged(run: BaseRun) -> None:
    """End the command with code 3 and the reason if the run was stopped because it diverged."""
    if run.diverged and run.rounds > len(run.records):
        exit_with(f"{run.diverged}. {REMEDY}", 3)


def make_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    """A table for the screen. Columns of numbers are aligned right. Text that is too wide is folded, never cut."""
    table = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    for i, column in enumerate(columns):
        is_text = any(isinstance(row[i], str) and not row[i][:1].isdigit() for row in rows)
        least = min(max((len(str(row[i])) for row in rows), default=0), NAME) if i == 0 else None
        table.add_column(column, justify="left" if is_text else "right", overflow="fold", min_width=least)
    for row in rows:
        table.add_row(*map(str, row))
    return table


def record_text(record: Record) -> str:
    """A round's leading figure (if evaluated) and training loss: `test accuracy 91.11 %, training loss 0.199`."""
    figure = leading_figure(record.metrics)
    loss = record.training.get("loss")
    parts = [
        f"test {figure.measure} {figure.text(figure.of(record.metrics))} %" if figure is not None else "",
        f"training loss {loss:.3f}" if loss is not None else "",
    ]
    return ", ".join(filter(None, parts))


class Meter:
    """Progress towards a total: a bar on a terminal, elsewhere a line every few seconds."""

    def __init__(self, screen: Console, bar: Progress, total: int, completed: int = 0) -> None:
        self.screen, self.bar = screen, bar
        self.printed = time.monotonic()
        self.task = bar.add_task("", total=total, completed=completed, text="")

    def update(self, completed: float, text: str, line: str, *, always: bool = False) -> None:
        """Show `text` beside the bar, or print `line`: if enough time has passed, or `always`."""
        self.bar.update(self.task, completed=completed, text=text)
        if not self.screen.is_terminal and (always or time.monotonic() - self.printed > INTERVAL):
            self.screen.print(line)
            self.printed = time.monotonic()


@contextmanager
def metered(screen: Console, total: int, completed: int = 0, unit: str = "round") -> Iterator[Meter]:
    """A `Meter` for the work inside; `unit` is what the bar counts."""
    columns = (
        TextColumn(unit),
        MofNCompleteColumn(),
        BarColumn(bar_width=30),
        TextColumn("{task.fields[text]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=screen, disable=not screen.is_terminal) as bar:
        yield Meter(screen, bar, total, completed)
