"""`fedskew watch`: runs in the browser, while they go on and after."""

from __future__ import annotations

import os
import sys
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def add_commands(app: typer.Typer) -> None:
    """Add `watch` to the command line."""
    app.command("watch")(watch_command)


def watch_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", hidden=True)] = Path("runs"),
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="N", help="Port; 0 for any free one.")] = 8471,
    host: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS", help="Address to listen on; one that other machines reach needs --token and --certs."
        ),
    ] = "127.0.0.1",
    token: Annotated[
        str,
        typer.Option(
            envvar="FEDSKEW_WATCH_TOKEN", metavar="TEXT", help="Password of the page; a browser must give it once."
        ),
    ] = "",
    certs: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Use TLS, with the server's folder of `fedskew certs`.")
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Open the page in the browser of this machine.")] = False,
) -> None:
    """Show runs in the browser: state, curves, clients, costs, sites. Reads only; stop it with Ctrl-C.

    DIR is a run's directory, or a folder of runs at any depth; default runs.
    """
    from fedskew.watch.server import Address, make_server

    server, listener, url = make_server(folder, Address(host, port, token, certs))
    print(f"watching {folder} at {url}" + (" (open it with ?token=...)" if token else ""), flush=True)
    if open_:
        open_page(url)
    server.run(sockets=[listener])


def check_watch() -> None:
    """Raise `UsageError` if the page cannot be served, before a run begins."""
    from fedskew.watch.server import web_server

    web_server()


@contextmanager
def beside(run_path: Path | None, wanted: bool, screen: Console) -> Iterator[None]:
    """With `wanted`, serve the page about a run (and those beside it in runs/) while the block goes on."""
    if not wanted or run_path is None:
        yield
        return
    from fedskew.watch.server import Address, watching

    folder = run_path.parent if run_path.parent.name == "runs" else run_path
    with watching(folder, Address(port=0)) as url:
        screen.print(f"watch it at {url}", soft_wrap=True)
        open_page(url)
        try:
            yield
        finally:
            screen.print(f"to see it again: fedskew watch {folder}", markup=False, soft_wrap=True)


def open_page(url: str) -> None:
    """Open an address in a browser with windows, if this is an interactive session that can have one."""
    has_windows = sys.platform in ("darwin", "win32") or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if has_windows and sys.stdout.isatty():
        webbrowser.open(url)
