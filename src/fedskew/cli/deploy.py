"""`fedskew serve` and `fedskew join`: a run between real sites."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedskew.cli.closing import privacy_text
from fedskew.cli.console import end_if_diverged, exit_with, print_json, record_text, resumable
from fedskew.cli.logs import Say, printer
from fedskew.cli.options import (
    ClientsPerRound,
    Config,
    DataDir,
    Epsilon,
    Json,
    MethodName,
    OnDivergence,
    Quorum,
    Resume,
    Rounds,
    RunOut,
    Seed,
    Set,
    check_choice,
    check_resume,
    default_out,
    given_settings,
    read_experiment,
)
from fedskew.core.settings import UsageError

if TYPE_CHECKING:
    from fedskew.deploy.server import Served

Certs = Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of keys made by `fedskew certs`.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Use no TLS and no keys, for a trial on one machine.")]
LogFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Also log to this file; rotated at 10 MB, five are kept.")
]


def add_commands(app: typer.Typer) -> None:
    """Add these commands to the command line."""
    app.command("serve")(serve_command)
    app.command("join")(join_command)


def serve_command(
    config: Config = None,
    method: MethodName = None,
    data: Annotated[
        str | None,
        typer.Option(metavar="DATA", help="'sites': every site uses its own data; or a data set to split among them."),
    ] = None,
    split: Annotated[
        str | None, typer.Option(metavar="SPLIT", help="How to split that data set, into as many clients as sites.")
    ] = None,
    rounds: Rounds = None,
    clients_per_round: ClientsPerRound = None,
    epsilon: Epsilon = None,
    quorum: Quorum = None,
    on_divergence: OnDivergence = None,
    seed: Seed = None,
    set_: Set = None,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="N", help="Port; 0 for any free one.")] = 8470,
    certs: Certs = None,
    insecure: Insecure = False,
    sites: Annotated[
        int, typer.Option(min=0, metavar="N", help="Number of sites; with keys, it is the number of keys.")
    ] = 0,
    timeout: Annotated[
        float, typer.Option(min=1, metavar="SECONDS", help="How long a round waits for its sites.")
    ] = 600,
    grace: Annotated[
        float,
        typer.Option(min=0, metavar="SECONDS", help="How long a site may be offline before a round leaves it out."),
    ] = 30,
    patience: Annotated[
        float, typer.Option(min=1, metavar="SECONDS", help="How long to wait for the sites at the start.")
    ] = 600,
    limit: Annotated[int, typer.Option(min=1, metavar="MB", help="Largest reply accepted from a site.")] = 2000,
    choose: Annotated[
        str, typer.Option(metavar="FROM", help="Which sites clients are selected from: all, or online.")
    ] = "all",
    norm_bound: Annotated[
        float, typer.Option(min=0, metavar="FACTOR", help="Refuse an update this many times the usual norm; 0: never.")
    ] = 1000,
    profile: Annotated[
        bool,
        typer.Option("--profile", help="Ask the sites for their label counts; only those that allow it tell them."),
    ] = False,
    server_data: Annotated[
        str, typer.Option(metavar="PATH", help="Test set and public data of the server itself.")
    ] = "",
    out: RunOut = None,
    resume: Resume = None,
    log_file: LogFile = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Serve a run to sites on a network; they join with `fedskew join`."""
    from fedskew.deploy.hosting import Hosting
    from fedskew.deploy.server import Served
    from fedskew.experiment.run_directory import read_settings

    settings = given_settings(
        method=method,
        data=data,
        split=split,
        rounds=rounds,
        clients_per_round=clients_per_round,
        quorum=quorum,
        on_divergence=on_divergence,
        epsilon=epsilon,
        seed=seed,
    )
    kind: Any = choose
    check_choice("--choose", choose, "all", "online")
    hosting = Hosting(
        host=host,
        port=port,
        certs=certs,
        insecure=insecure,
        sites=sites,
        timeout=timeout,
        grace=grace,
        patience=patience,
        limit=limit * 10**6,
        norm_bound=norm_bound,
        profile=profile,
        choose=kind,
        server_data=server_data,
        data_dir=data_dir,
    )
    if resume is not None:
        check_resume(resume, settings, set_, config, out)
        experiment, path = read_settings(resume), resume
    else:
        experiment = read_experiment(config, settings, set_)
        path = out or default_out(experiment)
    say = printer(sys.stderr if as_json else sys.stdout, log_file)
    served = Served(experiment, hosting, path, say, resume=resume is not None)
    follow(served, say)
    absent = served.absent()
    if as_json:
        assert served.result is not None
        print_json(served.result.as_dict() | {"directory": str(path), "absent": absent})
    end_if_diverged(served)
    if absent:
        exit_with(f"the run is complete, but these sites never took part: {', '.join(absent)}.", 5)


def follow(served: Served, say: Say) -> None:
    """Carry out a run between sites and print a line per round."""
    path, insecure = served.path, served.hosting.insecure
    for note in served.notes:
        say(f"note: {note}")
    if insecure:
        say("note: --insecure: anyone who reaches this port can join, and read and change what is sent")
    names = ", ".join(served.agreed.sites) or "any"
    scheme = "http" if insecure else "https"
    say(f"ready: {scheme}://{served.hosting.host}:{served.port}, waiting for {served.expected} sites ({names})")
    if served.start is not None:
        say(f"resuming {path} after round {served.start[0]} of {served.rounds}")
    with resumable(f"fedskew serve --resume {shlex.quote(str(path))}"):
        for record in served:
            for client, why in record.lost.items():
                say(f"warning: round {record.number}: site {served.agreed.sites[client]} {why}")
            if record.diverged and served.experiment.on_divergence == "warn":
                say(f"warning: {record.diverged}")
            took = f"{record.seconds:.1f} s, clients {record.client_seconds:.1f} s"
            say(f"round {record.number}/{served.rounds}: {record_text(record)} ({took})")
    assert served.result is not None
    if served.result.epsilon is not None:
        say(privacy_text(served.result))
    say(f"digest {served.result.digest[:16]}, model_digest {served.result.model_digest[:16]}")
    say(f"saved in {path}")


def join_command(
    server: Annotated[str, typer.Option(metavar="HOST:PORT", help="Address of the server.")],
    data: Annotated[
        str, typer.Option(metavar="DATA", help="Path of this site's own data, or the data set the server splits.")
    ],
    certs: Certs = None,
    insecure: Insecure = False,
    name: Annotated[str, typer.Option(metavar="NAME", help="This site's name; with keys, that of its key.")] = "",
    state: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Folder of what this site keeps between rounds; default fedskew-state/<name>."
        ),
    ] = None,
    stay: Annotated[bool, typer.Option("--stay", help="Wait for the next run when one has finished.")] = False,
    device: Annotated[
        str, typer.Option(metavar="DEVICE", help="auto, cpu, cuda or mps; bit-identical results only on cpu.")
    ] = "cpu",
    allow: Annotated[
        list[str] | None,
        typer.Option(metavar="method=NAMES", help="Serve only these methods, as in method=fedavg,fedcrc; repeatable."),
    ] = None,
    policy_file: Annotated[
        Path | None,
        typer.Option(
            "--policy", metavar="FILE", help="TOML file of what this site does for a server and what may leave it."
        ),
    ] = None,
    allow_profile: Annotated[
        bool, typer.Option("--allow-profile", help="Tell a server that asks how many training samples each class has.")
    ] = False,
    accept: Annotated[
        list[str] | None,
        typer.Option(metavar="HASH", help="Agree to the experiment with this fingerprint; repeatable."),
    ] = None,
    max_seconds: Annotated[
        float | None,
        typer.Option(min=0, metavar="SECONDS", help="Longest time for one request, default 3600; 0 for no limit."),
    ] = None,
    fresh_state: Annotated[
        bool, typer.Option("--fresh-state", help="Go on without a state that is missing or damaged.")
    ] = False,
    log_file: LogFile = None,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Join a run as one site. Its data stay here; updates go to the server."""
    from fedskew.deploy import joining
    from fedskew.deploy.limits import memory_limit
    from fedskew.deploy.node import Node
    from fedskew.deploy.policy import join_policy
    from fedskew.deploy.states import States
    from fedskew.experiment.machine import pick_device

    address = joining.server_address(server, certs, insecure)
    if insecure and not name:
        raise UsageError("--insecure needs a --name of this site, as in --name site-1.")
    if certs is not None:
        name = certs.resolve().name
    policy = join_policy(policy_file, allow or [], accept or [], max_seconds, allow_profile)
    memory_limit(policy.memory)
    say = printer(sys.stderr, log_file, f"fedskew: {name}: ")
    loaded = joining.load_own_data(data, data_dir)
    folder = state or Path("fedskew-state") / name
    lock = joining.lock_states(folder)
    try:
        states = States(folder, fresh=fresh_state)
        site = Node(
            data, states, name=name, data_dir=data_dir, device=pick_device(device), policy=policy, loaded=loaded
        )
        joining.join(site, address, stay=stay, say=say)
    finally:
        lock.release()
    if as_json:
        print_json({"site": name, "server": server, "state": str(folder)})
