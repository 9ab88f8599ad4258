"""Federated learning on skewed (non-IID) data: methods, splits, a simulator, and deployment between real sites.

>>> import fedskew
>>> run = fedskew.run(fedskew.Experiment(method=fedskew.FedProx(mu=0.1), data="digits", rounds=2))
>>> for record in run:
...     print(record.number, sorted(record.training))
1 ['loss']
2 ['loss']
>>> run.result.method
'fedprox'
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

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
    from fedskew.data.sources.loading import load_data as load_data
    from fedskew.data.sources.user_data import from_dataset as from_dataset
    from fedskew.data.split.chain import make_partition as make_partition
    from fedskew.evaluation.metrics import Metrics as Metrics
    from fedskew.evaluation.rounds import to_target as to_target
    from fedskew.experiment.config import Evaluation as Evaluation
    from fedskew.experiment.config import Experiment as Experiment
    from fedskew.experiment.config import Holdout as Holdout
    from fedskew.experiment.config import Stop as Stop
    from fedskew.experiment.config import Trouble as Trouble
    from fedskew.experiment.export import export as export
    from fedskew.experiment.result import Result as Result
    from fedskew.experiment.run import Run as Run
    from fedskew.experiment.run import resume as resume
    from fedskew.experiment.run import run as run
    from fedskew.experiment.run_directory import read_run as read_run
    from fedskew.experiment.use import Predictions as Predictions
    from fedskew.experiment.use import TrainedModel as TrainedModel
    from fedskew.experiment.use import load as load
    from fedskew.federation.private import Privacy as Privacy
    from fedskew.federation.protocol import Record as Record
    from fedskew.federation.robust import Robust as Robust
    from fedskew.methods import *  # noqa: F403  every method by its class name
    from fedskew.methods import REGISTRY as METHODS
    from fedskew.studies.advise import Advice as Advice
    from fedskew.studies.advise import Limits as Limits
    from fedskew.studies.advise import advise as advise

# Where each name is found, on first use: importing torch takes seconds, and `fedskew --help` needs none of it.
_MODULES = {
    "core.fit": ("fit",),
    "core.method": ("Method", "Update"),
    "core.settings": ("UsageError",),
    "core.site": ("Site",),
    "core.tensors": ("Payload", "Tensors"),
    "core.training": ("Training",),
    "data.dataset": ("DataSet",),
    "data.sources.loading": ("load_data",),
    "data.sources.user_data": ("from_dataset",),
    "data.split.chain": ("make_partition",),
    "evaluation.metrics": ("Metrics",),
    "evaluation.rounds": ("to_target",),
    "experiment.config": ("Evaluation", "Experiment", "Holdout", "Stop", "Trouble"),
    "experiment.export": ("export",),
    "experiment.result": ("Result",),
    "experiment.run": ("Run", "resume", "run"),
    "experiment.run_directory": ("read_run",),
    "experiment.use": ("Predictions", "TrainedModel", "load"),
    "federation.private": ("Privacy",),
    "federation.protocol": ("Record",),
    "federation.robust": ("Robust",),
    "studies.advise": ("Advice", "Limits", "advise"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
__all__ = ["METHODS", *_MODULE_OF]  # and every method by its class name, see `dir(fedskew)`

if not TYPE_CHECKING:  # so that a type checker rejects names that do not exist

    def __getattr__(name):
        if name in _MODULE_OF:
            return getattr(import_module(f"fedskew.{_MODULE_OF[name]}"), name)
        if not name.startswith("_"):
            registry = import_module("fedskew.methods").REGISTRY
            if name == "METHODS":
                return registry
            if registry.get(name.lower(), object).__name__ == name:
                return registry[name.lower()]
        raise AttributeError(f"module 'fedskew' has no attribute {name!r}")

    def __dir__():
        methods = (kind.__name__ for kind in import_module("fedskew.methods").REGISTRY.values())
        return sorted([*__all__, *methods, "__version__"])
