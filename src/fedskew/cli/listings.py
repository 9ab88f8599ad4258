"""What there is, and how data would be dealt: the tables of `fedskew split`, `data`, `methods` and `models`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from fedskew.cli.console import console, emit, table
from fedskew.core.settings import UsageError, choose
from fedskew.data.sources.loading import listing, load
from fedskew.data.split.chain import listing as splits_listing
from fedskew.data.split.chain import make_partition
from fedskew.data.split.skew import skew
from fedskew.methods import REGISTRY
from fedskew.models import listing as models_listing


def show_split(text: str, data: str, seed: int, png: Path | None, data_dir: Path | None, as_json: bool) -> None:
    source = load(data, data_dir)
    partition = make_partition(text, source.y_train, seed=seed, classes=source.classes, owners=source.owners_train)
    figures = skew(partition, source.y_train, source.classes)
    screen = console(as_json)
    if png is not None:
        from fedskew.data.split.plot import plot_partition

        try:
            plot_partition(partition, source.y_train, source.classes, png)
        except OSError as error:
            raise UsageError(f"{png} cannot be written: {error.strerror}.") from None
    if as_json:
        emit(
            {"split": text, "data": data, "seed": seed, "public": len(partition.public), "notes": partition.notes}
            | figures.as_dict()
        )
        return
    shown = figures.table[:40]
    names = source.labels or tuple(str(c) for c in range(source.classes))
    few = source.classes <= 26
    columns = ["client", "samples", "classes", "distance", *(names if few else ())]
    rows = [
        [
            i,
            int(figures.sizes[i]),
            int(figures.classes[i]),
            f"{figures.distance[i]:.2f}",
            *(map(int, row) if few else ()),
        ]
        for i, row in enumerate(shown)
    ]
    screen.print(table(f"{text} on {data}, seed {seed}", columns, rows))
    if len(figures.table) > len(shown):
        screen.print(f"... and {len(figures.table) - len(shown)} more clients")
    sizes = figures.sizes
    facts = [
        ("clients", len(sizes)),
        ("samples a client, least / median / most", f"{sizes.min()} / {np.median(sizes):.0f} / {sizes.max()}"),
        (
            "classes a client, least / mean / most",
            f"{figures.classes.min()} / {figures.classes.mean():.1f} / {figures.classes.max()}",
        ),
        ("label entropy, mean (nats)", f"{figures.mean_entropy:.2f} of {np.log(source.classes):.2f}"),
        ("distance to the global mix, mean", f"{figures.mean_distance:.2f}"),
        ("Gini of the sizes", f"{figures.gini:.2f}"),
        ("imbalance of the classes", f"{figures.imbalance:.1f}"),
        ("public samples", len(partition.public)),
    ]
    screen.print()
    screen.print(table("skew", ["figure", "value"], facts))
    for note in partition.notes:
        screen.print(f"note: {note}")
    if png is not None:
        screen.print(f"drawn to {png}")


def list_splits(as_json: bool) -> None:
    known = splits_listing()
    if as_json:
        emit(known)
        return
    screen = console(as_json)
    for kind, entries in known.items():
        screen.print(table(f"{kind}s", ["name", "what it does"], list(entries.items())))
        screen.print()
    screen.print("any cuts, one partitioner, any features: longtail:factor=100+dirichlet:alpha=0.1,clients=20")


def list_data(data_dir: Path | None, as_json: bool) -> None:
    rows = listing(data_dir)
    if as_json:
        emit({"data": rows})
        return
    columns = list(rows[0])
    shown = [["-" if row[c] is None else row[c] for c in columns] for row in rows]
    console(as_json).print(table("data sets", columns, shown))


def list_methods(as_json: bool) -> None:
    from fedskew.report import method_docs as handbook

    entries = [handbook.entry(name) for name in REGISTRY]
    if as_json:
        emit({"methods": [dataclasses.asdict(one) for one in entries]})
        return
    screen = console(as_json)
    screen.print(table("methods", handbook.COLUMNS, [handbook.row(one) for one in entries]))
    screen.print(f"\n{handbook.footnote()}\n`fedskew methods NAME` shows one in full: equations, settings, departures.")


def show_method(name: str, as_json: bool) -> None:
    from fedskew.report import method_docs as handbook

    choose("method", name, REGISTRY)
    one = handbook.entry(name)
    if as_json:
        emit(dataclasses.asdict(one))
    else:
        console(as_json).print("\n".join(handbook.details(one)), markup=False, soft_wrap=True)


def list_models(as_json: bool) -> None:
    rows = models_listing()
    if as_json:
        emit({"models": rows})
        return
    console(as_json).print(table("models", list(rows[0]), [list(row.values()) for row in rows]))
