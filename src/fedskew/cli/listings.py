"""`fedskew split`, `data`, `methods` and `models`: what is available, and how a split divides data among clients."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedskew.cli.console import make_screen, make_table, print_json
from fedskew.cli.options import DataDir, Json
from fedskew.core.settings import UsageError

if TYPE_CHECKING:
    from fedskew.data.dataset import DataSet
    from fedskew.data.split.partition import Partition
    from fedskew.data.split.skew import Skew

CLIENTS = 40  # rows of the table of a split
CLASSES = 26  # with more classes, the table has no columns of classes


def add_commands(app: typer.Typer) -> None:
    """Add these commands to the command line."""
    app.command("split")(split_command)
    app.command("data")(data_command)
    app.command("methods")(methods_command)
    app.command("models")(models_command)


def split_command(
    text: Annotated[str, typer.Argument(metavar="SPLIT", hidden=True)] = "dirichlet:alpha=0.3,clients=10",
    data: Annotated[str, typer.Option(metavar="DATA", help="Name of a data set, or a path to your own.")] = "digits",
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Seed of the split.")] = 0,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the split to this file.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the available splits.")] = False,
    data_dir: DataDir = None,
    as_json: Json = False,
) -> None:
    """Show how a split divides data among clients.

    Prints samples by client and class, and figures of skew. SPLIT defaults to dirichlet:alpha=0.3,clients=10.
    """
    if list_:
        list_splits(as_json)
    else:
        show_split(text, data, seed, png, data_dir, as_json)


def data_command(data_dir: DataDir = None, as_json: Json = False) -> None:
    """List data sets.

    Says whether each is available, its size and shape, and whether it has as many samples as published.
    """
    from fedskew.data.sources.loading import listing

    rows = listing(data_dir)
    if as_json:
        print_json({"data": rows})
        return
    columns = list(rows[0])
    shown = [["-" if row[c] is None else row[c] for c in columns] for row in rows]
    make_screen(as_json).print(make_table("data sets", columns, shown))


def methods_command(
    name: Annotated[str | None, typer.Argument(metavar="METHOD", hidden=True)] = None,
    as_json: Json = False,
) -> None:
    """List methods, or show one METHOD in full.

    The list has their papers, what they send and keep beyond FedAvg, and the models they give.
    """
    if name is None:
        list_methods(as_json)
    else:
        show_method(name, as_json)


def models_command(as_json: Json = False) -> None:
    """List models."""
    from fedskew.models import listing

    rows = listing()
    if as_json:
        print_json({"models": rows})
        return
    make_screen(as_json).print(make_table("models", list(rows[0]), [list(row.values()) for row in rows]))


def show_split(text: str, data: str, seed: int, png: Path | None, data_dir: Path | None, as_json: bool) -> None:
    """Split a data set, print samples by client and class and how skewed they are, and draw it if `png` is given."""
    from fedskew.data.sources.loading import load
    from fedskew.data.split.chain import make_partition
    from fedskew.data.split.skew import skew

    source = load(data, data_dir)
    partition = make_partition(text, source.y_train, seed=seed, classes=source.classes, owners=source.owners_train)
    found = skew(partition, source.y_train, source.classes)
    features = split_feature_skew(text, source, seed)
    if png is not None:
        from fedskew.data.split.plot import plot_partition

        try:
            plot_partition(partition, source.y_train, source.classes, png)
        except OSError as error:
            raise UsageError(f"{png} cannot be written: {error.strerror}.") from None
    if as_json:
        about = {"split": text, "data": data, "seed": seed, "public": len(partition.public), "notes": partition.notes}
        print_json(about | found.as_dict() | {"features": features})
        return
    screen = make_screen(as_json)
    screen.print(make_table(f"{text} on {data}, seed {seed}", *client_rows(found, source)))
    if len(found.table) > CLIENTS:
        screen.print(f"... and {len(found.table) - CLIENTS} more clients")
    screen.print()
    screen.print(make_table("skew", ["figure", "value"], skew_rows(found, source, partition, features)))
    for note in partition.notes:
        screen.print(f"note: {note}")
    if png is not None:
        screen.print(f"drawn to {png}")


def split_feature_skew(text: str, source: DataSet, seed: int) -> float | None:
    """The feature skew of a split under the initial net of an experiment with it; None if it cannot be computed."""
    from fedskew.experiment.assemble import assemble
    from fedskew.experiment.config import Experiment
    from fedskew.experiment.skewness import initial_feature_skew

    try:
        assembled = assemble(Experiment(data=source, split=text, seed=seed))
    except UsageError:  # the split can be shown all the same
        return None
    return initial_feature_skew(assembled.world, list(assembled.members))


def client_rows(found: Skew, source: DataSet) -> tuple[list[str], list[list[Any]]]:
    """Titles and rows of the table of clients: samples, classes, distance to the global mix, samples by class."""
    few = source.classes <= CLASSES
    names = source.labels or tuple(str(c) for c in range(source.classes))
    rows = [
        [i, int(found.sizes[i]), int(found.classes[i]), f"{found.distance[i]:.2f}", *(map(int, row) if few else ())]
        for i, row in enumerate(found.table[:CLIENTS])
    ]
    return ["client", "samples", "classes", "distance", *(names if few else ())], rows


def skew_rows(found: Skew, source: DataSet, partition: Partition, features: float | None) -> list[tuple[str, Any]]:
    """The figures of a split's skew, as (words, value); `features` is the feature skew (None: not known)."""
    import numpy as np

    sizes, classes = found.sizes, found.classes
    return [
        ("clients", len(sizes)),
        ("samples per client, min / median / max", f"{sizes.min()} / {np.median(sizes):.0f} / {sizes.max()}"),
        ("classes per client, min / mean / max", f"{classes.min()} / {classes.mean():.1f} / {classes.max()}"),
        ("label entropy, mean (nats)", f"{found.mean_entropy:.2f} of {np.log(source.classes):.2f}"),
        ("effective classes per client, mean", f"{found.mean_effective:.2f} of {source.classes}"),
        ("empty (client, class) cells", f"{100 * found.empty:.0f} %"),
        ("distance to the global mix, mean: total variation", f"{found.mean_distance:.2f}"),
        ("Hellinger", f"{found.mean_hellinger:.2f}"),
        ("Jensen-Shannon", f"{found.mean_jensen_shannon:.2f}"),
        ("Gini coefficient of the sizes", f"{found.gini:.2f}"),
        ("imbalance factor of the classes", f"{found.imbalance:.1f}"),
        ("feature skew under the initial net", "-" if features is None else f"{features:.3f}"),
        ("public samples", len(partition.public)),
    ]


def list_splits(as_json: bool) -> None:
    """Print the parts a split can be made of: cuts, partitioners, features."""
    from fedskew.data.split.chain import listing

    known = listing()
    if as_json:
        print_json(known)
        return
    screen = make_screen(as_json)
    for kind, entries in known.items():
        screen.print(make_table(f"{kind}s", ["name", "what it does"], list(entries.items())))
        screen.print()
    screen.print(
        "A split is one partitioner, with any cuts before it and features after it: "
        "longtail:factor=100+dirichlet:alpha=0.1,clients=20"
    )


def list_methods(as_json: bool) -> None:
    """Print one line per method."""
    from fedskew.methods._find import all_methods
    from fedskew.report import method_docs

    entries = [method_docs.entry(name) for name in all_methods()]
    if as_json:
        print_json({"methods": [dataclasses.asdict(one) for one in entries]})
        return
    screen = make_screen(as_json)
    screen.print(make_table("methods", method_docs.COLUMNS, [method_docs.row(one) for one in entries]))
    screen.print(f"\n{method_docs.footnote()}")
    screen.print("`fedskew methods METHOD` shows one in full: equations, settings, departures.")


def show_method(name: str, as_json: bool) -> None:
    """Print one method in full."""
    from fedskew.report import method_docs

    one = method_docs.entry(name)
    if as_json:
        print_json(dataclasses.asdict(one))
    else:
        make_screen(as_json).print("\n".join(method_docs.details(one)), markup=False, soft_wrap=True)
