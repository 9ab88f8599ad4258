"""A client's own model of a finished run, as the last evaluation had it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from fedskew.core.method import Method
from fedskew.core.seeding import Purpose, one_thread
from fedskew.core.settings import UsageError
from fedskew.core.tensors import Payload
from fedskew.core.user_code import split_text
from fedskew.data.dataset import DataSet
from fedskew.data.split.partition import Partition, Parts
from fedskew.experiment.assemble import assemble, world_of
from fedskew.experiment.card import ModelCard
from fedskew.experiment.config import Experiment, from_dict, read_toml
from fedskew.experiment.run_directory import DEPLOYMENT, SETTINGS, is_run, read_run, read_settings
from fedskew.federation.simulate.jobs import decode_state
from fedskew.federation.world import World


def experiment_of(
    path: Path, *, net: nn.Module | str | None, head: str, method: Method | None, data: DataSet | None
) -> Experiment:
    """The experiment of a run, with what the user gave in place of what its settings only name.

    UsageError if the settings name code in a file: it is not run because a run's directory says so.
    """
    if not is_run(path):
        return read_settings(path)  # says what is missing
    values = read_toml(path / SETTINGS)
    table = values.get("method")
    named = {"method": table.get("name") if isinstance(table, dict) else "", "net": values.get("model")}
    for word, given in (("method", method), ("net", net)):
        if given is None and split_text(str(named[word])) is not None:
            raise UsageError(
                f"the {word} of {path} is your own, {named[word]}: load the run in Python with "
                f"fedskew.load({str(path)!r}, {word}=...)."
            )
    if method is not None:
        values.pop("method", None)
    changes: dict[str, Any] = {"method": method, "data": data, "model": net, "head": head if net is not None else None}
    return replace(from_dict(values), **{key: value for key, value in changes.items() if value is not None})


def personal_model(
    path: Path, card: ModelCard, experiment: Experiment, client: int, folder: Path | None
) -> tuple[Payload, bool]:
    """(model of one client as the last evaluation had it, whether it lacks batch-norm statistics)."""
    if (path / DEPLOYMENT).exists():
        raise UsageError(f"{path} is a run between sites: a site's own model stays with the site.")
    saved = read_run(path, experiment)
    method = experiment.method
    if type(method).personalise is Method.personalise:
        world = _empty_world(card, experiment)
    else:  # it may train further on the client's data
        try:
            world = assemble(experiment, data_dir=folder).world
        except UsageError as error:
            raise UsageError(f"the model of client {client} needs the data of the run: {error}") from None
    try:
        state = decode_state(saved.store().get(client))
    except (OSError, ValueError) as error:
        raise UsageError(f"the state of client {client} in {path} cannot be read: {error}.") from None
    with one_thread():
        site = world.site(client, saved.records[-1].round, "evaluate", Purpose.EVALUATE)
        model = method.personalise(site, method.broadcast(saved.server()), state)
    return model, card.batch_norm == "local" and "buffers" not in state


def _empty_world(card: ModelCard, experiment: Experiment) -> World:
    """The world of a run without its data."""
    nothing = np.empty(0, np.int64)
    x = card.inputs()(card.example(1)).numpy()[:0] if card.table is not None else card.example(0).numpy()
    data = DataSet(card.data, x, nothing, x, nothing, len(card.labels), mean=card.mean, std=card.std)
    parts = [Parts(nothing, nothing, nothing)] * card.population
    return world_of(experiment, data, Partition((nothing,) * card.population, nothing), parts, "cpu")
