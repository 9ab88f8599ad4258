"""`fedskew check`: whether a method satisfies what every method must."""

from __future__ import annotations

from typing import Annotated

import typer

from fedskew.cli.console import make_screen, print_json
from fedskew.cli.options import Json


def add_commands(app: typer.Typer) -> None:
    """Add this command to the command line."""
    app.command("check")(check_command)


def check_command(
    method: Annotated[str, typer.Argument(metavar="METHOD", help="A method, such as my.py:Pull or fedprox:mu=0.1.")],
    model: Annotated[str, typer.Option(metavar="MODEL", help="The net to check it with.")] = "mlp:hidden=32",
    as_json: Json = False,
) -> None:
    """Check a METHOD against the laws of all methods.

    It must not change its arguments, must give the same bits on any number of workers, keep nothing between calls, and
    be FedAvg with its terms off. A dash marks a law that does not apply. Takes seconds, on a small part of the digits.
    Exit code 1 if a law is broken.
    """
    from fedskew.experiment.given import method_of
    from fedskew.studies.laws import check

    screen, outcomes = make_screen(as_json), []
    for outcome in check(method_of(method), model):
        outcomes.append(outcome)
        mark = {None: "-     ", "": "[green]ok[/green]    "}.get(outcome.problem, "[red]broken[/red]")
        screen.print(f"{mark} {outcome.law}", highlight=False)
        if outcome.problem:
            screen.print(f"       {outcome.problem}", markup=False, highlight=False)
    broken = sum(bool(outcome.problem) for outcome in outcomes)
    if as_json:
        print_json({"method": method, "broken": broken, "laws": [outcome._asdict() for outcome in outcomes]})
    else:
        screen.print(f"\n{method}: {'all laws hold' if not broken else f'{broken} of {len(outcomes)} laws are broken'}")
    if broken:
        raise typer.Exit(1)
