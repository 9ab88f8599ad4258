"""Federated learning that survives skewed data."""

from fedskew.data.dataset import DataSet
from fedskew.data.own import from_dataset
from fedskew.data.sources import load
from fedskew.data.splits import deal
from fedskew.evaluate import to_target
from fedskew.experiment import Evaluation, Experiment, Holdout, Trouble
from fedskew.federation.loop import Record
from fedskew.method import Method, Update
from fedskew.methods import REGISTRY as METHODS
from fedskew.methods.fedavg import FedAvg
from fedskew.methods.fedprox import FedProx
from fedskew.runner import Run, resume, run
from fedskew.settings import Mistake
from fedskew.site import Site, fit
from fedskew.tensors import Payload, Tensors
from fedskew.training import Training

__version__ = "0.1.0"
__all__ = [
    "METHODS",
    "DataSet",
    "Evaluation",
    "Experiment",
    "FedAvg",
    "FedProx",
    "Holdout",
    "Method",
    "Mistake",
    "Payload",
    "Record",
    "Run",
    "Site",
    "Tensors",
    "Training",
    "Trouble",
    "Update",
    "deal",
    "fit",
    "from_dataset",
    "load",
    "resume",
    "run",
    "to_target",
]
