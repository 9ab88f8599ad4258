"""The model of a finished run in use: load it, predict with it, take it elsewhere."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedskew.core.method import Method
from fedskew.core.net import Net, outputs
from fedskew.core.samples import pieces
from fedskew.core.seeding import one_thread
from fedskew.core.settings import UsageError, path_of, unknown
from fedskew.core.site import fill
from fedskew.core.user_code import split_text
from fedskew.data.dataset import DataSet, as_images
from fedskew.data.sources.inputs import read_inputs
from fedskew.evaluation.scores import BATCH
from fedskew.experiment.assemble import assemble
from fedskew.experiment.card import ModelCard, card_of_assembled
from fedskew.experiment.given import method_from
from fedskew.experiment.model_files import read_card, read_model
from fedskew.experiment.nets import net_builder
from fedskew.experiment.personal import experiment_of, personal_model
from fedskew.methods import REGISTRY
from fedskew.models import wrap
from fedskew.models.quick import own_net


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

    def __repr__(self) -> str:
        found = np.bincount(self.numbers, minlength=len(self.labels)).tolist()
        said = [f"{n} {label}" for n, label in zip(found, self.labels, strict=True) if n]
        more = [f"{len(said) - 10} more classes"] if len(said) > 10 else []
        return f"<Predictions of {len(self.classes)} samples: {', '.join(said[:10] + more)}>"


class TrainedModel:
    """The model of a finished run: the global one, or a client's own. Made by `load`.

    card: what goes into the net and what comes out.
    net: the net, in evaluation mode. It takes inputs that are normalised already; `module` takes raw ones.
    client: the number of the client whose model it is; None: the global model.
    batch_statistics: batch norm uses the statistics of each batch, because the model has none of its own.
    """

    def __init__(
        self, card: ModelCard, net: Net, *, client: int | None, batch_statistics: bool, method: Method | None = None
    ) -> None:
        self.card, self.net, self.client, self.batch_statistics = card, net.eval(), client, batch_statistics
        self._method = method  # puts a head of its own into the net; None: it does not

    def __repr__(self) -> str:
        return f"<TrainedModel: {self.whose} ({self.card.net or self.card.module}); takes {self.card.expects()}>"

    @property
    def whose(self) -> str:
        """Whose model it is, in words; a client by its name if it has one."""
        return (
            "the global model" if self.client is None else f"the model of client {client_name(self.card, self.client)}"
        )

    def predict(self, x: Any) -> Predictions:
        """The classes of samples.

        x: an array or tensor of raw samples: images uint8 [n, height, width, channels], vectors float [n, ...], or
            rows of a table [n, columns] in the order of `card.table.columns` with NaN for missing values and the
            numbers `card.table.columns[i].values` for categories. Or the path of a folder of images, a .csv or an
            .npz.
        """
        logits = self.logits(read_inputs(str(x), self.card.shape, self.card.table).x if _is_path(x) else x)
        numbers = logits.argmax(1)
        labels = self.card.labels
        labels += tuple(f"output {n}" for n in range(len(labels), logits.shape[1]))  # a user's net may have more
        return Predictions(
            classes=[labels[n] for n in numbers.tolist()],
            numbers=numbers.numpy(),
            probabilities=logits.softmax(1).numpy(),
            labels=labels,
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
        return own_names(self.net.state_dict(), self.card.head)

    def module(self) -> nn.Module:
        """A plain torch module, without anything of fedskew's own, from raw samples to logits."""
        if self.batch_statistics:
            raise UsageError(
                "this model has no batch-norm statistics (training.batch_norm=local): take a client's with client=..."
            )
        net = copy.deepcopy(self.net) if self.card.module else _built(self.card, False, self._method)
        net.load_state_dict(self.net.state_dict())
        return nn.Sequential(self.card.inputs(), net).eval().requires_grad_(False)


def _is_path(x: Any) -> bool:
    return isinstance(x, str | Path)


def own_names(weights: dict[str, Tensor], head: str) -> dict[str, Tensor]:
    """Weights of a `Net` made by `wrap` under the names of the user's net. `head`: see `wrap`; "": not such a net."""
    if not head:
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
    net: nn.Module | str | None = None,
    method: Method | None = None,
    data: DataSet | None = None,
    data_dir: Path | str | None = None,
) -> TrainedModel:
    """Load the model of a finished run.

    run: the run's directory.
    client: the number or name of a client, for its own model; None: the global model.
    net: the net, if it is one of your own: a module, whose weights are not used, or its text form, "my.py:net". Code
        that a run's directory names is not run without it.
    method: the method, if it is one of your own and puts a head of its own into the net, or for a client's model.
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
    path, folder = path_of(run, "run"), path_of(data_dir, "data_dir") if data_dir else None
    card = read_card(path) or _card_of_old_run(path, net, method, data, folder)
    check_net(path, card, net)
    changes = _head_method(path, card, method)
    if client is None:
        if not card.has_global:
            names = ", ".join(card.clients) or f"0 to {card.population - 1}"
            raise UsageError(f"{card.method} has no global model: choose a client with --client or client=, {names}.")
        model, lacks = read_model(path), card.batch_norm == "local"
    else:
        read_model(path)  # raises unless the run is finished
        number = client_number(card, client)
        experiment = experiment_of(path, net=net, head=card.head, method=method, data=data)
        model, lacks = personal_model(path, card, experiment, number, folder)
    built = _built(card, card.step == "fast", changes, net)
    try:
        fill(built, model)
    except (RuntimeError, ValueError) as error:
        raise UsageError(f"the weights in {path} do not fit its net {card.net or card.module}: {error}.") from None
    return TrainedModel(
        card,
        built,
        client=None if client is None else number,
        batch_statistics=lacks and _has_norms(built),
        method=changes,
    )


def check_net(path: Path, card: ModelCard, net: nn.Module | str | None) -> None:
    """Raise UsageError unless `net` is given if and only if the net of a run is the user's own."""
    if card.module and net is None:
        text = card.module if split_text(card.module) else "FILE.py:NAME"
        raise UsageError(
            f"the net of {path} is your own, {card.module}: give it with --net {text}, "
            f"or in Python with fedskew.load({str(path)!r}, net=...)."
        )
    if net is not None and not card.module:
        raise UsageError(f"the net of {path} is {card.net}, not one of your own: leave out the net.")
    if split_text(card.net) is not None or (isinstance(net, str) and split_text(net) is None):
        raise UsageError(f"net {net or card.net} is invalid: expected FILE.py:NAME.")


def _head_method(path: Path, card: ModelCard, given: Method | None) -> Method | None:
    """The method of a run that puts a head of its own into the net; None if it does not."""
    if not card.prepare:
        return None
    name = str(card.prepare.get("name"))
    if given is None and name not in REGISTRY:
        raise UsageError(
            f"the net of {path} has a head of your own method {name}: load it in Python with "
            f"fedskew.load({str(path)!r}, method=...)."
        )
    return given or method_from(card.prepare)


def _built(card: ModelCard, fast: bool, method: Method | None, own: nn.Module | str | None = None) -> Net:
    if isinstance(own, nn.Module):
        net = own_net(partial(wrap, own, card.head), card.shape, fast)
    else:
        net = net_builder(own or card.net, card.shape, len(card.labels), 0, fast, card.head)()
    return net if method is None else cast(Net, method.prepare(net, torch.Generator()))


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


def client_name(card: ModelCard, number: int) -> str:
    """The name of a client; its number if it has none."""
    return card.clients[number] if card.clients else str(number)


def _card_of_old_run(
    path: Path, net: nn.Module | str | None, method: Method | None, data: DataSet | None, folder: Path | None
) -> ModelCard:
    experiment = experiment_of(path, net=net, head="", method=method, data=data)
    try:
        return card_of_assembled(experiment, assemble(experiment, data_dir=folder))
    except UsageError as error:
        raise UsageError(
            f"{path} was written by an earlier version and has no model.json, which says how to use its model; "
            f"it cannot be made from the data, either: {error}"
        ) from None
