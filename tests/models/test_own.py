"""A user's own net by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fedskew
from fedskew.core.settings import UsageError
from fedskew.experiment.assemble import assemble
from fedskew.experiment.config import Experiment
from fedskew.models.own import build_own, find_head, own_net_text, plain_value

pytestmark = pytest.mark.usefixtures("own_folder")


def test_a_function_is_called_with_shape_classes_and_options() -> None:
    net = build_own("my.py:net", (1, 8, 8), 10, seed=0, width=12)
    assert net.features == 12
    assert net(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


def test_the_seed_decides_its_initial_values() -> None:
    a, b, c = (build_own("my.py:net", (1, 8, 8), 10, seed=seed).head.weight for seed in (0, 0, 1))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def test_a_module_is_taken_as_it_is_and_not_changed() -> None:
    net = build_own("my.py:module", (1, 8, 8), 10, seed=0)
    again = build_own("my.py:module", (1, 8, 8), 10, seed=1)
    assert torch.equal(net.head.weight, again.head.weight)


def test_the_head_is_the_last_linear_layer_or_the_one_named() -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    assert find_head(module, 2) == "2"
    with pytest.raises(UsageError, match=r"0 \(3 outputs\), 2 \(2 outputs\)"):
        find_head(module, 5)
    assert build_own("my.py:net", (1, 8, 8), 10, seed=0, head="3").head.out_features == 10


@pytest.mark.parametrize(
    ("text", "value"), [("8", 8), ("0.5", 0.5), ("true", True), ("relu", "relu"), ("[1, 2]", [1, 2])]
)
def test_options_are_numbers_booleans_or_text(text: str, value: Any) -> None:
    assert plain_value(text) == value


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("my.py:no_method", "expected a module or a function"),
        ("my.py:net:depth=3", "cannot be called with"),
        ("my.py:module:width=3", "takes no options"),
        ("my.py:Pull", "cannot be called with"),
        ("my.py:net:width=-1", "failed for shape"),
        ("gone.py:net", "there is no file"),
    ],
)
def test_mistakes_are_one_sentence(model: str, words: str) -> None:
    with pytest.raises(UsageError, match=r".*") as caught:
        assemble(Experiment(model=model))
    assert words in str(caught.value)


def test_a_torch_module_needs_no_head_to_be_named() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    assert assemble(Experiment(model=module)).world.net.features == 16


def test_our_own_nets_are_no_users_nets() -> None:
    assert own_net_text("mlp:hidden=16") is None


@pytest.mark.parametrize("step", ["fast", "plain"])
@pytest.mark.parametrize("method", ["fedavg", "fedprox:mu=0.1", "scaffold"])
def test_layers_that_the_user_froze_do_not_train(method: Any, step: Any) -> None:
    """A pretrained body, say. The rest trains; batch norm keeps its statistics if the whole body is frozen."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 10))
    for frozen, moved in ((range(1, 5), {"head."}), (range(1, 2), {"body.2", "body.4", "head."})):
        for i, layer in enumerate(net):
            layer.requires_grad_(i not in frozen)
        experiment = fedskew.Experiment(method=method, model=net, split="iid:clients=2", rounds=1, step=step)
        run = fedskew.run(experiment)
        (record,) = run
        before = run.assembled.world.initial["parameters"]
        changed = {name for name, t in record.server["parameters"].items() if not torch.equal(t, before[name])}
        assert {name[:6] if name.startswith("body") else name[:5] for name in changed} == moved
        statistics = run.assembled.world.initial["buffers"]["body.2.running_mean"]
        same = torch.equal(record.server["buffers"]["body.2.running_mean"], statistics)
        assert same == (moved == {"head."})


class Ends(nn.Module):
    """A net of two layers, listed in any order, and something after the last one."""

    def __init__(self, end: Any = None, *, turned: bool = False) -> None:
        super().__init__()
        layers = {"hidden": nn.Linear(64, 10), "out": nn.Linear(10, 10)}
        for name in sorted(layers, reverse=turned):
            setattr(self, name, layers[name])
        self.end = end

    def forward(self, x: Any) -> Any:
        made = self.out(self.hidden(x.flatten(1)).relu())
        return made if self.end is None else self.end(made)


@pytest.mark.parametrize("end", [nn.LogSoftmax(1), nn.Softmax(1), lambda z: 3 * z, lambda z: z.clamp(min=0)])
def test_a_net_that_does_something_after_its_last_layer_is_refused(end: Any) -> None:
    """It would be computed before that layer, on features: another net, which learned nothing with a log-softmax."""
    with pytest.raises(UsageError, match="the model's output is not that of its layer 'out'"):
        assemble(Experiment(model=Ends(end)))


@pytest.mark.parametrize("turned", [False, True])
def test_the_head_is_the_layer_that_is_called_last_whatever_the_order_of_the_list(turned: bool) -> None:
    run = fedskew.run(Experiment(model=Ends(turned=turned), split="iid:clients=2", rounds=1))
    assert run.assembled.world.net.head_name == "out"
    assert len(list(run)) == 1


def test_a_lazy_net_is_refused() -> None:
    """Its values would be drawn at the first use, in each process others."""
    with pytest.raises(UsageError, match="lazy layers"):
        assemble(Experiment(model=nn.Sequential(nn.Flatten(), nn.LazyLinear(10))))


def test_a_net_without_values_is_built_to_see_how_large_it_is() -> None:
    """As a site does with what a server asks for. It cannot be run."""
    with torch.device("meta"):
        assert build_own("my.py:net", (1, 8, 8), 10, seed=0).head_name == "3"
