"""What one must know to use the model of a run, besides its weights. As JSON it is the file model.json."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import torch
from torch import Tensor, nn

from fedskew.core.method import Method
from fedskew.core.user_code import split_text
from fedskew.data.table import Preparation, TableInput
from fedskew.experiment.assemble import Assembled
from fedskew.experiment.config import Experiment
from fedskew.experiment.nets import model_text
from fedskew.federation.world import World

SCHEMA = 1  # version of the format; increased when a reader of older files would misread a newer one


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """The net of a run, what goes into it and what comes out."""

    net: str  # name and options, as for --model; "": a net of the user's own
    module: str = ""  # the user's own net: its class, such as "shop.nets.Small", or its text form, "my.py:net:width=8"
    head: str = ""  # the name of its last layer
    step: Literal["fast", "plain"] = "fast"  # which layers the net was trained with; the weights are the same
    kind: Literal["image", "table", "vector"]  # what an input is
    shape: tuple[int, ...]  # of one input as the net sees it; images: (channels, height, width)
    mean: tuple[float, ...] = ()  # of an image's pixels / 255 per channel; () for other inputs
    std: tuple[float, ...] = ()
    table: Preparation | None = None  # how a row of a table becomes an input; None for other inputs
    labels: tuple[str, ...]  # names of the classes, in the order of the outputs
    clients: tuple[str, ...] = ()  # names of the clients; (): they have none
    population: int  # number of clients
    method: str
    prepare: dict[str, Any] = {}  # the method with its settings, if it puts a head of its own into the net; {}: not
    has_global: bool  # whether the server has a model; if not, only clients have
    batch_norm: Literal["aggregate", "local", "frozen"] = "aggregate"
    data: str  # the data set, as in settings.toml
    schema: int = SCHEMA

    def inputs(self) -> nn.Module:
        """A module that turns raw samples into inputs of the net."""
        if self.table is not None:
            return TableInput(self.table)
        return ImageInput(self.mean, self.std) if self.kind == "image" else VectorInput()

    def example(self, samples: int) -> Tensor:
        """Blank raw samples."""
        if self.table is not None:
            return torch.zeros(samples, len(self.table.columns), dtype=torch.float64)
        if self.kind == "image":
            channels, height, width = self.shape
            return torch.zeros(samples, height, width, channels, dtype=torch.uint8)
        return torch.zeros(samples, *self.shape)

    def expects(self) -> str:
        """What a raw sample must be, in words."""
        if self.table is not None:
            return f"rows of a table with the columns {', '.join(c.name for c in self.table.columns)}"
        if self.kind == "image":
            channels, height, width = self.shape
            return f"images of {width}x{height} pixels with {channels} channel{'s' if channels > 1 else ''} (uint8)"
        return f"vectors of shape {'x'.join(map(str, self.shape))} (float32)"


class ImageInput(nn.Module):
    """Images uint8 [n, height, width, channels] as a net sees them: float32 [n, channels, height, width], normalised.

    Computes what `fedskew.core.samples.Data.take` does.
    """

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean) * 255)
        self.register_buffer("std", torch.tensor(std) * 255)
        self.mean: Tensor
        self.std: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return x.float().sub(self.mean).div(self.std).permute(0, 3, 1, 2)


class VectorInput(nn.Module):
    """Vectors as they are, in float32."""

    def forward(self, x: Tensor) -> Tensor:
        return x.float()


def card_of(
    experiment: Experiment,
    world: World,
    labels: tuple[str, ...],
    table: Preparation | None = None,
    clients: tuple[str, ...] = (),
) -> ModelCard:
    """The card of a run in this world.

    labels: names of the classes.
    table: how rows become inputs, if the data are a table.
    clients: their names; () if they have none.
    """
    is_image = world.x.dtype == torch.uint8
    sample = tuple(world.x.shape[1:])
    shape = (sample[2], sample[0], sample[1]) if is_image else sample
    own = own_net(experiment)
    return ModelCard(
        net="" if own or not isinstance(experiment.model, str) else model_text(experiment.model, shape),
        module=own,
        head=world.net.head_name,
        step=experiment.step,
        kind="image" if is_image else "table" if table is not None else "vector",
        shape=shape,
        mean=world.mean,
        std=world.std,
        table=table,
        labels=labels,
        clients=clients,
        population=world.population,
        method=experiment.method_name,
        prepare=experiment.as_dict()["method"] if type(experiment.method).prepare is not Method.prepare else {},
        has_global=experiment.method.has_global,
        batch_norm=experiment.training.batch_norm,
        data=str(experiment.as_dict()["data"]),
    )


def own_net(experiment: Experiment) -> str:
    """What names a user's own net: its class, or its text form; "" if the net is one by name."""
    if isinstance(experiment.model, str):
        return experiment.model if split_text(experiment.model) is not None else ""
    kind = type(experiment.model)
    return f"{kind.__module__}.{kind.__qualname__}"


def card_of_assembled(experiment: Experiment, assembled: Assembled) -> ModelCard:
    """The card of a simulated run."""
    return card_of(experiment, assembled.world, assembled.labels, assembled.table, assembled.owners)
