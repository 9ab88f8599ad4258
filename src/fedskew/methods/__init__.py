"""One file per method; this is the list of them."""

from fedskew.method import Method
from fedskew.methods.fedavg import FedAvg
from fedskew.methods.fedprox import FedProx

REGISTRY: dict[str, type[Method]] = {
    "fedavg": FedAvg,
    "fedprox": FedProx,
}
