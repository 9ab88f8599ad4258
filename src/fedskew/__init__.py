"""Federated learning that survives skewed data."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedskew.data.dataset import DataSet as DataSet
    from fedskew.data.own import from_dataset as from_dataset
    from fedskew.data.sources import load as load
    from fedskew.data.splits import deal as deal
    from fedskew.evaluate import to_target as to_target
    from fedskew.experiment import Evaluation as Evaluation
    from fedskew.experiment import Experiment as Experiment
    from fedskew.experiment import Holdout as Holdout
    from fedskew.experiment import Trouble as Trouble
    from fedskew.federation.loop import Record as Record
    from fedskew.method import Method as Method
    from fedskew.method import Update as Update
    from fedskew.methods import REGISTRY as METHODS
    from fedskew.methods.fedavg import FedAvg as FedAvg
    from fedskew.methods.fedprox import FedProx as FedProx
    from fedskew.runner import Run as Run
    from fedskew.runner import resume as resume
    from fedskew.runner import run as run
    from fedskew.settings import Mistake as Mistake
    from fedskew.site import Site as Site
    from fedskew.site import fit as fit
    from fedskew.tensors import Payload as Payload
    from fedskew.tensors import Tensors as Tensors
    from fedskew.training import Training as Training

__version__ = "0.1.0"

# where each name is found, on first use: importing torch takes seconds, and `fedskew --help` needs none of it
_PLACES = {
    "data.dataset": ("DataSet",),
    "data.own": ("from_dataset",),
    "data.sources": ("load",),
    "data.splits": ("deal",),
    "evaluate": ("to_target",),
    "experiment": ("Evaluation", "Experiment", "Holdout", "Trouble"),
    "federation.loop": ("Record",),
    "method": ("Method", "Update"),
    "runner": ("Run", "resume", "run"),
    "settings": ("Mistake",),
    "site": ("Site", "fit"),
    "tensors": ("Payload", "Tensors"),
    "training": ("Training",),
}
_PLACE = {name: place for place, names in _PLACES.items() for name in names}
__all__ = ["METHODS", *_PLACE]  # and every method by its class's name


def __getattr__(name: str) -> Any:
    if name in _PLACE:
        return getattr(import_module(f"fedskew.{_PLACE[name]}"), name)
    if not name.startswith("_"):
        methods = import_module("fedskew.methods").REGISTRY
        if name == "METHODS":
            return methods
        for kind in methods.values():
            if kind.__name__ == name:
                return kind
    raise AttributeError(f"module 'fedskew' has no attribute {name!r}")
