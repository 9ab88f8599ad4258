"""The entry point of the command line, its errors and its exit codes.

A user's mistake is one sentence on stderr and exit code 2, never a traceback. A lost quorum is exit code 3, a full disk
4, Ctrl-C and SIGTERM are 130. Modules that need torch are imported inside the commands, so that `fedskew --help` is
fast.
"""

from __future__ import annotations

import importlib
import signal
from typing import Annotated, Any, NoReturn

import typer

from fedskew import __version__
from fedskew.cli import advise, board, check, deploy, listings, operations, run, studies, use, watch
from fedskew.cli.console import DISK_FULL, NO_ACCESS, disk_full, exit_with
from fedskew.core.settings import UsageError

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"fedskew {__version__}")
        raise typer.Exit


@app.callback()
def callback(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Federated learning on skewed data."""


for group in (run, use, advise, studies, board, watch, listings, check, deploy, operations):
    group.add_commands(app)


def _interrupt(number: int, frame: object) -> NoReturn:
    """SIGTERM ends a command as Ctrl-C does: with a checkpoint."""
    raise KeyboardInterrupt


def option_error() -> Any:
    """The exception Typer raises for wrong options: its own in newer versions, Click's in older ones."""
    return getattr(typer, "TyperException", None) or importlib.import_module("click").ClickException


def main(arguments: list[str] | None = None) -> None:
    """Run a command; `arguments` default to those of the process. Ends with `SystemExit` unless all went well."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        code = app(arguments, standalone_mode=False)  # what typer.Exit was given; 130 on Ctrl-C in newer versions
        if code == 130:
            raise KeyboardInterrupt
        if code:
            raise SystemExit(code)
    except UsageError as error:
        exit_with(str(error), 2)
    except option_error() as error:
        exit_with(error.format_message(), 2)
    except typer.Exit as leave:
        raise SystemExit(leave.exit_code) from None
    except (KeyboardInterrupt, typer.Abort):
        exit_with("stopped.", 130)
    except BrokenPipeError:
        raise SystemExit(1) from None
    except OSError as error:
        if error.errno in NO_ACCESS and error.filename:  # of the user's machine, and nothing that code could do about
            exit_with(f"{error.filename} cannot be used: {error.strerror}.", 2)
        if error.errno not in DISK_FULL:
            raise
        exit_with(f"{disk_full(error)}.", 4)
