"""`fedskew board`: run the board, show it, write its page, and verify one of its cells."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedskew.cli.options import DataDir, Json

board = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Which method for which skew: run, show, verify.")

Tasks = Annotated[list[str] | None, typer.Argument(metavar="TASK", hidden=True)]
Evidence = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Folder of the tasks' JSON files; default: those of the package.")
]


def add_commands(app: typer.Typer) -> None:
    """Add `board` to the command line."""
    app.add_typer(board, name="board")


@board.command("run")
def run_command(
    tasks: Tasks = None,
    methods: Annotated[
        list[str] | None,
        typer.Option("--method", metavar="METHOD", help="Run only this method; repeatable. Default: all."),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the runs.")] = Path("runs/board"),
    evidence: Evidence = None,
    partial: Annotated[
        bool, typer.Option("--partial", help="Also write tasks that are not finished, marked as such.")
    ] = False,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Run the board, cell by cell. Run it again to resume: finished cells are read.

    TASK is t0 to t6; default: all, in the order t6 t1 t2 t3 t0 t5 t4. For each method three learning rates are tried
    on validation data, then it is run with the task's seeds. The results of a finished task are written as a
    JSON file to the folder --evidence.
    """
    from fedskew.cli.board_output import run_and_show

    run_and_show(tasks or [], methods or [], out, evidence, partial=partial, data_dir=data_dir, as_json=as_json)


@board.command("show")
def show_command(tasks: Tasks = None, evidence: Evidence = None, as_json: Json = False) -> None:
    """Show what the board found: an overview, or the whole table of each TASK."""
    from fedskew.cli.board_output import show

    show(tasks or [], evidence, as_json)


@board.command("page")
def page_command(
    out: Annotated[Path, typer.Option(metavar="FILE", help="The HTML file to write.")] = Path("docs/board.html"),
    evidence: Evidence = None,
    as_json: Json = False,
) -> None:
    """Write the board as one self-contained HTML page."""
    from fedskew.cli.board_output import write_page

    write_page(out, evidence, as_json)


@board.command("verify")
def verify_command(
    cell: Annotated[str, typer.Argument(metavar="CELL", hidden=True)],
    evidence: Evidence = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Run one cell of the board again and compare its digest.

    CELL is a task, a method and a seed, such as t6/fedprox/3. The exit code is 1 if the results differ.
    """
    from fedskew.cli.board_output import verify

    verify(cell, evidence, data_dir, as_json)
