"""The model of a finished run in use: load it, predict with it, take it elsewhere."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedskew.core.method import Method
from fedskew.core.net import Net, outputs
from fedskew.core.samples import pieces
from fedskew.core.seeding import Purpose, one_thread
from fedskew.core.settings import UsageError, unknown
from fedskew.core.site import fill
from fedskew.core.tensors import Payload
from fedskew.data.dataset import DataSet, as_images
from fedskew.data.sources.inputs import read_inputs
from fedskew.data.split.partition import Partition, Parts
from fedskew.evaluation.scores import BATCH
from fedskew.experiment.assemble import assemble, net_builder, world_of
from fedskew.experiment.card import ModelCard, card_of_assembled
from fedskew.experiment.config import Experiment
from fedskew.experiment.run_directory import DEPLOYMENT, is_run, read_card, read_model, read_run, read_settings
from fedskew.federation.simulate.jobs import decode_state
from fedskew.federation.world import World
from fedskew.models import wrap


@dataclass(frozen=True, eq=False)
class Predictions:
    """What a model says about samples.

    classes: the name of the most likely class of each sample.
    numbers: the same as positions in `labels`.  # [samples]
    probabilities: of every class.  # [samples, classes]
    labels: the names of all classes.
    """

    classes: list[str]
    numbers: NDArray[np.int64]
    probabilities: NDArray[np.float32]
    labels: tuple[str, ...]


class TrainedModel:
    """The model of a finished run: the global one, or a client's own. Made by `load`.

    card: what goes into the net and what comes out.
    net: the net, in evaluation mode. It takes inputs that are normalised already; `module` takes raw ones.
    client: the number of the client whose model it is; None: the global model.
    batch_statistics: batch norm uses the statistics of each batch, because the model has none of its own.
    """

    def __init__(
        self, card: ModelCard, net: Net, *, client: int | None, batch_statistics: bool, own: nn.Module | None
    ) -> None:
        self.card, self.net, self.client, self.batch_statistics = card, net.eval(), client, batch_statistics
        self._own = own  # the user's own net, as it was given; None: a net by name

    def predict(self, x: Any) -> Predictions:
        """The classes of samples.

        x: an array or tensor of raw samples: images uint8 [n, height, width, channels], vectors float [n, ...], or
            rows of a table [n, columns] in the order of `card.table.columns` with NaN for missing values and the
            numbers `card.table.columns[i].values` for categories. Or the path of a folder of images, a .csv or an
            .npz.
        """
        logits = self.logits(read_inputs(str(x), self.card.shape, self.card.table).x if _is_path(x) else x)
        numbers = logits.argmax(1)
        return Predictions(
            classes=[self.card.labels[n] for n in numbers.tolist()],
            numbers=numbers.numpy(),
            probabilities=logits.softmax(1).numpy(),
            labels=self.card.labels,
        )

    @torch.no_grad()
    def logits(self, x: Any) -> Tensor:
        """The outputs of the net for raw samples, as evaluation computes them.  # [samples, classes]"""
        raw, inputs = checked(self.card, x), self.card.inputs()
        with one_thread():
            parts = [
                outputs(self.net, self.net, inputs(raw[positions]), batch_statistics=self.batch_statistics)
                for positions in pieces(len(raw), BATCH)
            ]
        return torch.cat(parts)

    def state_dict(self) -> dict[str, Tensor]:
        """The weights by name: those of the user's own net, or body.* and head.* of a net by name."""
        return own_names(self.net.state_dict(), self.card.head if self.card.module else None)

    def module(self) -> nn.Module:
        """A plain torch module, without anything of fedskew's own, from raw samples to logits."""
        if self.batch_statistics:
            raise UsageError(
                "this model has no batch-norm statistics (training.batch_norm=local): take a client's with client=..."
            )
        if self._own is not None:
            net: nn.Module = copy.deepcopy(self._own)
            net.load_state_dict(self.state_dict())
        else:
            net = net_builder(self.card.net, self.card.shape, len(self.card.labels), 0, fast=False)()
            net.load_state_dict(self.net.state_dict())
        return nn.Sequential(self.card.inputs(), net).eval().requires_grad_(False)


def _is_path(x: Any) -> bool:
    return isinstance(x, str | Path)


def own_names(weights: dict[str, Tensor], head: str | None) -> dict[str, Tensor]:
    """Weights of a `Net` made by `wrap` under the names of the user's net. `head`: see `wrap`; None: not such a net."""
    if head is None:
        return dict(weights)
    parts = {name: name.partition(".") for name in weights}
    return {
        rest if part == "body" else f"{head}.{rest}" if rest else head: weights[name]
        for name, (part, _, rest) in parts.items()
    }


def own_weights(run: Path, card: ModelCard) -> dict[str, Tensor]:
    """The weights of the global model of a run whose net is the user's own, under its own names."""
    weights = {name: t for group in read_model(run).values() for name, t in group.items()}
    return own_names(weights, card.head)


def checked(card: ModelCard, x: Any) -> Tensor:
    """Raw samples as a tensor; UsageError if they are not what the model takes."""
    array = x.detach().cpu().numpy() if isinstance(x, Tensor) else np.asarray(x)
    wrong = UsageError(f"samples of {array.dtype}{list(array.shape)} do not fit the model: expected {card.expects()}.")
    if array.dtype.kind not in "uifb" or not array.ndim or not len(array):
        raise wrong
    if card.kind == "image":
        if array.dtype != np.uint8 or array.ndim not in (3, 4):
            raise wrong
        array = as_images(array)
    else:
        array = array.astype(np.float64 if card.table is not None else np.float32)
        if np.isinf(array).any() or (card.table is None and np.isnan(array).any()):
            raise UsageError("the samples have values that are missing or infinite: expected finite numbers.")
    if array.shape[1:] != tuple(card.example(1).shape[1:]):
        raise wrong
    return torch.from_numpy(np.array(array))


def load(
    run: Path | str,
    *,
    client: int | str | None = None,
    net: nn.Module | None = None,
    data: DataSet | None = None,
    data_dir: Path | str | None = None,
) -> TrainedModel:
    """Load the model of a finished run.

    run: the run's directory.
    client: the number or name of a client, for its own model; None: the global model.
    net: the net, if it is one of your own; its weights are not used.
    data: the data set, if it was not given by name; needed only where a client's model is trained further on its data.
    data_dir: where named data sets are; None is the default folder.

    >>> import fedskew, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = fedskew.run(fedskew.Experiment(rounds=2), out=folder)
    ...     _ = list(run)
    ...     model = fedskew.load(folder)
    >>> x = fedskew.load_data("digits").x_test
    >>> predictions = model.predict(x[:5])
    >>> len(predictions.classes), predictions.probabilities.shape
    (5, (5, 10))
    """
    path, folder = Path(run), Path(data_dir) if data_dir else None
    card = read_card(path) or _card_of_old_run(path, net, data, folder)
    if card.module and net is None:
        raise UsageError(
            f"the net of {path} is a class of your own, {card.module}: load the run in Python with "
            f"fedskew.load({str(path)!r}, net={card.module.rpartition('.')[2]}(...))."
        )
    if net is not None and not card.module:
        raise UsageError(f"the net of {path} is {card.net}: leave out net=.")
    if client is None:
        if not card.has_global:
            names = ", ".join(card.clients) or f"0 to {card.population - 1}"
            raise UsageError(f"{card.method} has no global model: choose a client with --client or client=, {names}.")
        model, lacks = read_model(path), card.batch_norm == "local"
    else:
        read_model(path)  # raises unless the run is finished
        number = client_number(card, client)
        experiment = _experiment(path, card, net, data)
        model, lacks = _personal(path, card, experiment, number, folder)
    built = wrap(net, card.head) if net is not None else _built(card)
    try:
        fill(built, model)
    except (RuntimeError, ValueError) as error:
        raise UsageError(f"the weights in {path} do not fit its net {card.net or card.module}: {error}.") from None
    return TrainedModel(
        card, built, client=None if client is None else number, batch_statistics=lacks and _has_norms(built), own=net
    )


def _built(card: ModelCard) -> Net:
    return net_builder(card.net, card.shape, len(card.labels), 0, card.step == "fast")()


def _has_norms(net: nn.Module) -> bool:
    return any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in net.modules())


def client_number(card: ModelCard, client: int | str) -> int:
    """The number of a client given by number or name."""
    text = str(client)
    if text in card.clients:
        return card.clients.index(text)
    if text.isdecimal() and int(text) < card.population:
        return int(text)
    if card.clients:
        raise unknown("client", text, card.clients)
    raise UsageError(f"client {text} is invalid: expected a number from 0 to {card.population - 1}.")


def _experiment(path: Path, card: ModelCard, net: nn.Module | None, data: DataSet | None) -> Experiment:
    experiment = read_settings(path)
    if net is not None:
        experiment = replace(experiment, model=net, head=card.head)
    return experiment if data is None else replace(experiment, data=data)


def _card_of_old_run(path: Path, net: nn.Module | None, data: DataSet | None, folder: Path | None) -> ModelCard:
    if not is_run(path):
        read_settings(path)  # says what is missing
    try:
        experiment = read_settings(path)
        experiment = experiment if data is None else replace(experiment, data=data)
        experiment = experiment if net is None else replace(experiment, model=net)
        return card_of_assembled(experiment, assemble(experiment, data_dir=folder))
    except UsageError as error:
        raise UsageError(
            f"{path} was written by an earlier version and has no model.json, which says how to use its model; "
            f"it cannot be made from the data, either: {error}"
        ) from None


def _personal(
    path: Path, card: ModelCard, experiment: Experiment, client: int, folder: Path | None
) -> tuple[Payload, bool]:
    """(model of one client as the last evaluation had it, whether it lacks batch-norm statistics)."""
    if (path / DEPLOYMENT).exists():
        raise UsageError(f"{path} is a run between sites: a site's own model stays with the site.")
    saved = read_run(path)
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
