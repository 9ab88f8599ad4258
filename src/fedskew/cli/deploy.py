"""`fedskew serve`, `fedskew join`, `fedskew certs`: their options, and what they print."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from fedskew.cli.options import (
    Cohort,
    Config,
    DataDir,
    MethodName,
    Quorum,
    Resume,
    Rounds,
    RunOut,
    Seed,
    Set,
    default_out,
    pick_device,
    read_experiment,
)
from fedskew.core.settings import UsageError

if TYPE_CHECKING:
    from fedskew.deploy.server import Served

Certs = Annotated[Path | None, typer.Option(help="Folder of keys made by `fedskew certs`.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="No TLS, no keys: for a trial on one machine.")]


def attach(app: typer.Typer) -> None:
    app.command("serve")(serve_command)
    app.command("join")(join_command)
    app.command("certs")(certs_command)


def serve_command(
    config: Config = None,
    method: MethodName = None,
    data: Annotated[str | None, typer.Option(help="'sites': each brings its own; or a set to deal to them.")] = None,
    split: Annotated[str | None, typer.Option(help="How a named set is dealt: as many clients as sites.")] = None,
    rounds: Rounds = None,
    clients_per_round: Cohort = None,
    quorum: Quorum = None,
    seed: Seed = None,
    set_: Set = None,
    host: Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0 is every one.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 takes a free one.")] = 8470,
    certs: Certs = None,
    insecure: Insecure = False,
    sites: Annotated[int, typer.Option(min=0, help="How many sites there are; with keys, as many as keys.")] = 0,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds a round waits for its sites.")] = 600,
    patience: Annotated[float, typer.Option(min=1, help="Seconds to wait for the sites at the start.")] = 600,
    limit: Annotated[int, typer.Option(min=1, help="Megabytes a site's reply may have.")] = 2000,
    choose: Annotated[str, typer.Option(help="Whom a cohort is drawn from: all sites, or those online.")] = "all",
    server_data: Annotated[str, typer.Option(help="The server's own test set and public data, a path.")] = "",
    out: RunOut = None,
    resume: Resume = None,
    data_dir: DataDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout; all else on stderr.")] = False,
) -> None:
    """Serve a run to sites on a network. They take part with `fedskew join`."""
    from fedskew.deploy.hosting import Hosting
    from fedskew.deploy.server import Served, taken_up

    given = {
        "method.name": method,
        "data": data,
        "split": split,
        "rounds": rounds,
        "clients_per_round": clients_per_round,
        "trouble.quorum": quorum,
        "seed": seed,
    }
    values = {key: value for key, value in given.items() if value is not None}
    kind: Any = choose
    if choose not in ("all", "online"):
        raise UsageError(f"--choose {choose} will not do: all or online.")
    hosting = Hosting(host, port, certs, insecure, sites, timeout, patience, limit * 10**6, kind, server_data, data_dir)
    if resume is not None:
        if values or set_ or config or out:
            raise UsageError(f"--resume takes up {resume} as it was; it goes with no other setting.")
        experiment, place = taken_up(resume), resume
    else:
        experiment = read_experiment(config, values, set_ or [])
        place = out or default_out(experiment.method_name, str(experiment.data))
    say = _teller(as_json)
    served = Served(experiment, hosting, place, say, resume=resume is not None)
    _watch(served, hosting.insecure, say)
    if as_json:
        from fedskew.cli import console as show

        show.emit(served.result | {"directory": str(place)})


def _teller(as_json: bool) -> Any:
    stream = sys.stderr if as_json else sys.stdout
    return lambda text: print(text, file=stream, flush=True)


def _watch(served: Served, insecure: bool, say: Any) -> None:
    from fedskew.cli import console as show
    from fedskew.federation.protocol import QuorumLost

    place = served.directory.path
    for trouble in served.notes:
        say(f"note: {trouble}")
    if insecure:
        say("note: --insecure: whoever reaches this port can take part, read and change what is sent")
    names = ", ".join(served.agreed.sites) or "any"
    scheme = "http" if insecure else "https"
    say(f"ready: {scheme}://{served.hosting.host}:{served.port}, waiting for {served.expected} sites ({names})")
    if served.start is not None:
        say(f"taking up {place} after round {served.start[0]} of {served.rounds}")
    try:
        for record in served:
            for client, why in record.lost.items():
                say(f"round {record.round + 1}: site {served.agreed.sites[client]} {why}")
            took = f"{record.seconds:.1f} s, clients {record.client_seconds:.1f} s"
            say(f"round {record.round + 1}/{served.rounds}: {show.words(record)} ({took})")
    except KeyboardInterrupt:
        _leave(f"stopped; go on with: fedskew serve --resume {place}", 130)
    except QuorumLost as lost:
        _leave(f"{lost}. Nothing is lost; go on with: fedskew serve --resume {place}", 3)
    result = served.result
    say(f"digest {result['digest'][:16]}, model_digest {result['model_digest'][:16]}")
    say(f"all of it in {place}")


def _leave(sentence: str, code: int) -> NoReturn:
    print(f"fedskew: {sentence}", file=sys.stderr)
    raise SystemExit(code) from None


def join_command(
    server: Annotated[str, typer.Option(help="HOST:PORT of the server.")],
    data: Annotated[str, typer.Option(help="This site's own data (a path), or the named set the server deals.")],
    certs: Certs = None,
    insecure: Insecure = False,
    name: Annotated[str, typer.Option(help="This site's name; with keys, its key's name.")] = "",
    state: Annotated[Path | None, typer.Option(help="Folder for what this site keeps between rounds.")] = None,
    stay: Annotated[bool, typer.Option("--stay", help="Wait for further runs when one is over.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps; the same bits only on cpu.")] = "cpu",
    data_dir: DataDir = None,
) -> None:
    """Take part in a run as one site. Data stay here; updates go to the server."""
    from fedskew.deploy import node
    from fedskew.deploy.states import States

    address = node.server_address(server, certs, insecure)
    if insecure and not name:
        raise UsageError("--insecure needs a --name for this site, as in --name site-1.")
    if certs is not None:
        name = certs.resolve().name
    node.check_data(data, data_dir)
    folder = state or Path("fedskew-state") / name
    say = _teller(as_json=True)
    lock = node.lock_states(folder)
    try:
        own = node.Node(data, States(folder), name=name, data_dir=data_dir, device=pick_device(device))
        node.join(own, address, stay=stay, say=lambda text: say(f"fedskew: {name}: {text}"))
    finally:
        lock.release()


def certs_command(
    sites: Annotated[str, typer.Option(help="Names of the sites, e.g. hospital-a,hospital-b.")],
    hosts: Annotated[str, typer.Option(help="Names and addresses of the server.")] = "localhost,127.0.0.1",
    out: Annotated[Path, typer.Option(help="Folder to make.")] = Path("certs"),
    days: Annotated[int, typer.Option(min=1, help="Days the certificates hold.")] = 365,
) -> None:
    """Make a certificate authority, the server's certificate, and a key for each site."""
    from fedskew.deploy.certs import make_certs

    made = make_certs(out, _words(hosts), _words(sites), days)
    print(f"{made[0]}: for the server   (fedskew serve --certs {made[0]})")
    for folder in made[1:]:
        print(f"{folder}: for that site   (fedskew join --certs {folder})")
    print(f"{out / 'ca.key'}: signs further certificates; keep it off the network")


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]
