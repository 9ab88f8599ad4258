"""One file per method; this is the list of them."""

from fedskew.method import Method
from fedskew.methods.central import Central
from fedskew.methods.ditto import Ditto
from fedskew.methods.fedavg import FedAvg
from fedskew.methods.fedavgm import FedAvgM
from fedskew.methods.fedbabu import FedBABU
from fedskew.methods.fedcd import FedCD
from fedskew.methods.fedcrc import FedCRC
from fedskew.methods.feddc import FedDC
from fedskew.methods.feddyn import FedDyn
from fedskew.methods.fedfocal import FedFocal
from fedskew.methods.fedmr import FedMR
from fedskew.methods.fednova import FedNova
from fedskew.methods.fedntd import FedNTD
from fedskew.methods.fedper import FedPer
from fedskew.methods.fedproc import FedProc
from fedskew.methods.fedproto import FedProto
from fedskew.methods.fedprox import FedProx
from fedskew.methods.fedrep import FedRep
from fedskew.methods.finetune import FineTune
from fedskew.methods.local import Local
from fedskew.methods.moon import MOON
from fedskew.methods.scaffold import SCAFFOLD
from fedskew.methods.taunorm import TauNorm

REGISTRY: dict[str, type[Method]] = {
    "fedavg": FedAvg,
    "fedavgm": FedAvgM,
    "fedprox": FedProx,
    "scaffold": SCAFFOLD,
    "fednova": FedNova,
    "feddyn": FedDyn,
    "feddc": FedDC,
    "moon": MOON,
    "fedproc": FedProc,
    "fedproto": FedProto,
    "fedntd": FedNTD,
    "fedfocal": FedFocal,
    "taunorm": TauNorm,
    "fedbabu": FedBABU,
    "fedper": FedPer,
    "fedrep": FedRep,
    "ditto": Ditto,
    "fedcd": FedCD,
    "fedmr": FedMR,
    "fedcrc": FedCRC,
    "local": Local,
    "central": Central,
    "finetune": FineTune,
}
