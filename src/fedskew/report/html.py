"""`fedskew report`: runs as one HTML page that needs no network."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from fedskew import __version__
from fedskew.core.files import write_atomically
from fedskew.core.settings import UsageError
from fedskew.evaluation.figures import check_goal, target_value
from fedskew.report.page import Page
from fedskew.report.runs import find, grouped
from fedskew.report.sections import add_section


def write_report(
    folders: Sequence[Path],
    out: Path,
    *,
    drift: bool,
    data_dir: Path | None,
    goal: str | None = None,
    target: float | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> int:
    """Write one page about every run in these folders, at any depth.

    Args:
        folders: run directories, or folders that hold some.
        out: the file to write.
        drift: whether to compute drift from the saved models; this needs the data and takes longest.
        data_dir: folder of data sets; None for the default.
        goal: the figure that methods are ordered by, such as "f1"; None: the one that leads.
        target: show rounds and bytes until that figure reaches this value, in the unit that is printed (80 for 80 %);
            None: the value that FedAvg ends with.
        say: called with a line about what is done next, before each step that takes long.

    Returns:
        How many runs the page is about.
    """
    runs = find(folders)
    reach = None if target is None else target_value(target, check_goal(goal))
    groups = grouped(runs, check_goal(goal))
    say(f"reading {len(runs)} runs")
    page = Page()
    title = f"fedskew: {groups[0].title}" if len(groups) == 1 else f"fedskew: {len(groups)} settings"
    seeds = sorted({run.experiment.seed for run in runs})
    summary = (
        f"{len(runs)} runs, seeds {', '.join(map(str, seeds))}; fedskew {__version__}, {time.strftime('%Y-%m-%d')}"
    )
    page.add(f'<header><h1>fedskew report</h1><p class="soft">{summary}</p></header>')
    for group in groups:
        add_section(page, group, drift=drift, data_dir=data_dir, target=reach, say=say)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, page.html(title).encode())
    except OSError as error:
        raise UsageError(f"{out} cannot be written: {error.strerror}.") from None
    return len(runs)
