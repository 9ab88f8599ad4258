"""`fedskew report`: runs as one HTML page that needs no network."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from fedskew.core.files import write_atomically
from fedskew.core.settings import UsageError, library
from fedskew.report.page import Page
from fedskew.report.runs import find, grouped
from fedskew.report.sections import add_section


def write_report(
    folders: Sequence[Path],
    out: Path,
    *,
    drift: bool,
    data_dir: Path | None,
    say: Callable[[str], None] = lambda text: None,
) -> int:
    """Write one page about every run in these folders, at any depth.

    Args:
        folders: run directories, or folders that hold some.
        out: the file to write.
        drift: whether to compute drift from the saved models; this needs the data and takes longest.
        data_dir: folder of data sets; None for the default.
        say: called with a line about what is done next, before each step that takes long.

    Returns:
        How many runs the page is about.
    """
    library("plotly.offline", "report")  # so that a missing package is reported before the work
    runs = find(folders)
    groups = grouped(runs)
    say(f"reading {len(runs)} runs")
    page = Page()
    title = f"fedskew: {groups[0].title}" if len(groups) == 1 else f"fedskew: {len(groups)} settings"
    seeds = sorted({run.experiment.seed for run in runs})
    summary = f"{len(runs)} runs, seeds {', '.join(map(str, seeds))}; written {time.strftime('%Y-%m-%d')}"
    page.add(f'<header><h1>fedskew report</h1><p class="soft">{summary}</p></header>')
    for group in groups:
        add_section(page, group, drift=drift, data_dir=data_dir, say=say)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, page.html(title).encode())
    except OSError as error:
        raise UsageError(f"{out} cannot be written: {error.strerror}.") from None
    return len(runs)
