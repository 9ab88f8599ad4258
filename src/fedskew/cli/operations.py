"""`fedskew certs`, `fedskew status`, `fedskew forget`: what the operators of a server and of sites need."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fedskew.cli.console import print_json
from fedskew.cli.options import Json, check_choice
from fedskew.core.settings import UsageError


def add_commands(app: typer.Typer) -> None:
    """Add these commands to the command line."""
    app.command("certs")(certs_command)
    app.command("status")(status_command)
    app.command("forget")(forget_command)


def certs_command(
    action: Annotated[str, typer.Argument(metavar="ACTION", hidden=True)] = "make",
    sites: Annotated[str, typer.Option(metavar="NAMES", help="Names of the sites, e.g. hospital-a,hospital-b.")] = "",
    hosts: Annotated[
        str,
        typer.Option(
            metavar="NAMES", help="Names and addresses by which sites reach the server; default this machine."
        ),
    ] = "",
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write to.")] = Path("certs"),
    days: Annotated[int, typer.Option(min=1, metavar="N", help="Days until the server's certificate expires.")] = 365,
    as_json: Json = False,
) -> None:
    """Make keys: an authority, the server's certificate, a key per site.

    ACTION is make (the default), renew (a new certificate of the server), or revoke (shut the given sites out).
    """
    from fedskew.deploy import certs

    check_choice("certs", action, "make", "renew", "revoke")
    names = _words(sites)
    if action == "renew":
        until, valid = certs.renew(out, _words(hosts), days)
        words = [
            f"{out / 'server'}: valid until {until[:10]} for {', '.join(valid)}; copy it to the server, restart it"
        ]
        _print(as_json, {"server": str(out / "server"), "until": until, "hosts": valid}, words)
        return
    if not names:
        raise UsageError(f"certs {action} needs --sites, as in --sites hospital-a,hospital-b.")
    if action == "revoke":
        revoked = certs.revoke(out, names)
        words = [f"{path}: revoked; a server that reads this folder refuses the site from now on" for path in revoked]
        _print(as_json, {"revoked": names}, words)
        return
    server, *folders = certs.make_certs(out, _words(hosts), names, days)
    plain = {"server": str(server), "sites": {folder.name: str(folder) for folder in folders}}
    words = [f"{server}: for the server   (fedskew serve --certs {server})"]
    words += [f"{folder}: for that site   (fedskew join --certs {folder})" for folder in folders]
    words.append(f"{out / 'ca.key'}: signs further certificates; keep it off the network")
    _print(as_json, plain | {"authority": str(out / "ca.key"), "days": days}, words)


def _print(as_json: bool, value: dict[str, Any], lines: list[str]) -> None:
    """Print a JSON object, or lines for people."""
    if as_json:
        print_json(value)
    else:
        print("\n".join(lines))


def status_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", hidden=True)],
    as_json: Json = False,
) -> None:
    """Show a server's run (sites, round, refusals), or what left a site.

    DIR is the directory of a served run, or the --state folder of a site.
    """
    from fedskew.deploy.certs import days_left
    from fedskew.deploy.status import read_status

    status = read_status(folder)
    if as_json:
        print_json(status)
        return
    used, free = (f"{status['disk'][key] / 1e6:.0f} MB" for key in ("used", "free"))
    if status["kind"] == "server":
        state = f"running as process {status['pid']}" if status["running"] else "not running"
        print(f"server {status['address']}, {state}; round {status['round']} of {status['rounds']}; {status['time']}")
        for site in status["sites"]:
            agreed = "" if site["agreed"] else ", has not agreed to take part"
            lost = f", last round: {site['lost']}" if site["lost"] else ""
            print(f"  {site['name']}: {'online' if site['online'] else 'offline'}{agreed}{lost}")
        for name, until in status["certificates"].items():
            print(f"  {name} is valid until {until[:10]}, for {days_left(until)} days")
        for refusal in status["refusals"]:
            print(f"  {refusal}")
    else:
        for mark, what in status["accepted"].items():
            print(f"serves {mark}: {what}")
        last = f", the last at {status['last']['time']}" if status["last"] else ""
        print(f"{status['replies']} replies, {status['bytes'] / 1e6:.1f} MB left this site{last}")
        for run, entry in status["runs"].items():
            print(f"  state of run {run}: {entry['bytes'] / 1e6:.1f} MB")
    print(f"disk: {used} used, {free} free")


def forget_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", hidden=True)],
    older_than: Annotated[
        float, typer.Option(min=0, metavar="DAYS", help="Only states that were last written at least this long ago.")
    ] = 30,
    as_json: Json = False,
) -> None:
    """Remove old states of a site: those of runs that are over.

    DIR is the --state folder of the site.
    """
    import time

    from fedskew.deploy.joining import lock_states
    from fedskew.deploy.states import States

    if not folder.is_dir():
        raise UsageError(f"{folder} does not exist; expected the --state folder of a site.")
    lock = lock_states(folder)
    try:
        states = States(folder)
        old = {
            run: entry for run, entry in states.runs().items() if time.time() - entry["written"] >= older_than * 86400
        }
        for run in old:
            states.remove(run)
    finally:
        lock.release()
    words = [f"removed the state of run {run}: {entry['bytes'] / 1e6:.1f} MB" for run, entry in old.items()]
    _print(as_json, {"removed": list(old)}, words or [f"no state in {folder} is older than {older_than:g} days"])


def _words(text: str) -> list[str]:
    """`a, b` gives ["a", "b"]."""
    return [word.strip() for word in text.split(",") if word.strip()]
