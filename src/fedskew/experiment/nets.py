"""The net of an experiment: what its model setting means, and a function that builds it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from fedskew.core.net import Net, Shape
from fedskew.core.seeding import Purpose, seeded
from fedskew.core.settings import UsageError, parse
from fedskew.data.dataset import DataSet
from fedskew.experiment.config import Experiment
from fedskew.models import build as build_net
from fedskew.models import wrap
from fedskew.models.own import build_own, own_net_text, wrapped
from fedskew.models.quick import own_net


def model_text(model: str, shape: Shape) -> str:
    """The model setting, with "auto" replaced: a small CNN for images of at least 28 x 28 pixels, else an MLP.

    `shape` is that of one sample as a net sees it.
    """
    if model != "auto":
        return model
    return "simple-cnn" if len(shape) == 3 and min(shape[1:]) >= 28 else "mlp"


def net_maker(experiment: Experiment, data: DataSet) -> Callable[[], Any]:
    """A function that builds the initial net.

    It is called once here, and so is `Method.prepare`, so that errors occur now, not in a worker.
    """
    if isinstance(experiment.model, str):
        text = model_text(experiment.model, data.shape)
        make = net_builder(text, data.shape, data.classes, experiment.seed, experiment.step == "fast", experiment.head)
    else:
        head = wrapped(experiment.model, experiment.head, data.shape, data.classes).head_name
        make = partial(own_net, partial(wrap, experiment.model, head), data.shape, experiment.step == "fast")
    net = make()
    if not isinstance(experiment.model, str) or own_net_text(experiment.model):
        check_outputs(net, data)
    experiment.method.prepare(net, seeded(experiment.seed, Purpose.NET))
    return make


def check_outputs(net: nn.Module, data: DataSet) -> None:
    """Raise UsageError unless a user's net takes the data's samples and has an output for each class."""
    samples = torch.zeros(2, *data.shape)
    shape = "x".join(map(str, data.shape))
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            given = net.eval()(samples)
        found = tuple(given.shape)
    except Exception as error:  # the net is the user's: it may raise anything
        problem = str(error).strip().partition("\n")[0].rstrip(".")
        raise UsageError(f"the model cannot take samples of {data.name}, of shape {shape}: {problem}.") from None
    if len(found) != 2 or found[0] != 2 or found[1] < data.classes:
        raise UsageError(
            f"the model gives outputs of shape {found} for 2 samples: expected (2, {data.classes}), one for each class."
        )


def net_builder(text: str, shape: Shape, classes: int, seed: int, fast: bool, head: str = "") -> Callable[[], Net]:
    """A function that builds a net from its name and options in text form, such as "mlp:hidden=32".

    `head` names the last layer of a user's own net; "" finds it.
    """
    if (own := own_net_text(text)) is not None:
        return partial(own_net, partial(build_own, own[0], shape, classes, seed=seed, head=head, **own[1]), shape, fast)
    steps = parse(text, "model")
    if len(steps) > 1:
        raise UsageError(f"model '{text}' has more than one part; name one model.")
    name, options = steps[0][0], cast(dict[str, Any], steps[0][1])
    return partial(build_net, name, shape, classes, seed=seed, fast=fast, **options)
