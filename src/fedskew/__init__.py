"""Federated learning that survives skewed data."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedskew.core.fit import fit as fit
    from fedskew.core.method import Method as Method
    from fedskew.core.method import Update as Update
    from fedskew.core.settings import UsageError as UsageError
    from fedskew.core.site import Site as Site
    from fedskew.core.tensors import Payload as Payload
    from fedskew.core.tensors import Tensors as Tensors
    from fedskew.core.training import Training as Training
    from fedskew.data.dataset import DataSet as DataSet
    from fedskew.data.sources.loading import load as load
    from fedskew.data.sources.user_data import from_dataset as from_dataset
    from fedskew.data.split.chain import make_partition as make_partition
    from fedskew.evaluation.figures import to_target as to_target
    from fedskew.experiment.config import Evaluation as Evaluation
    from fedskew.experiment.config import Experiment as Experiment
    from fedskew.experiment.config import Holdout as Holdout
    from fedskew.experiment.config import Trouble as Trouble
    from fedskew.experiment.run import Run as Run
    from fedskew.experiment.run import resume as resume
    from fedskew.experiment.run import run as run
    from fedskew.federation.protocol import Record as Record
    from fedskew.methods import REGISTRY as METHODS
    from fedskew.methods.fedavg import FedAvg as FedAvg
    from fedskew.methods.fedprox import FedProx as FedProx

__version__ = "0.1.0"

# where each name is found, on first use: importing torch takes seconds, and `fedskew --help` needs none of it
_PLACES = {
    "core.fit": ("fit",),
    "core.method": ("Method", "Update"),
    "core.settings": ("UsageError",),
    "core.site": ("Site",),
    "core.tensors": ("Payload", "Tensors"),
    "core.training": ("Training",),
    "data.dataset": ("DataSet",),
    "data.sources.loading": ("load",),
    "data.sources.user_data": ("from_dataset",),
    "data.split.chain": ("make_partition",),
    "evaluation.figures": ("to_target",),
    "experiment.config": ("Evaluation", "Experiment", "Holdout", "Trouble"),
    "experiment.run": ("Run", "resume", "run"),
    "federation.protocol": ("Record",),
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
