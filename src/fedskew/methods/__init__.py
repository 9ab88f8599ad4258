"""Federated methods, one file each. REGISTRY lists them by the name used in settings."""

from fedskew.core.method import Method
from fedskew.methods.ccvr import CCVR
from fedskew.methods.central import Central
from fedskew.methods.creff import CReFF
from fedskew.methods.ditto import Ditto
from fedskew.methods.fedavg import FedAvg
from fedskew.methods.fedavgm import FedAvgM
from fedskew.methods.fedbabu import FedBABU
from fedskew.methods.fedbe import FedBE
from fedskew.methods.fedcd import FedCD
from fedskew.methods.fedcrc import FedCRC
from fedskew.methods.feddc import FedDC
from fedskew.methods.fedddc import FedDDC
from fedskew.methods.feddf import FedDF
from fedskew.methods.feddyn import FedDyn
from fedskew.methods.fedfocal import FedFocal
from fedskew.methods.fedgen import FedGen
from fedskew.methods.fedic import FEDIC
from fedskew.methods.fedmr import FedMR
from fedskew.methods.fednova import FedNova
from fedskew.methods.fedntd import FedNTD
from fedskew.methods.fedper import FedPer
from fedskew.methods.fedpg import FedPG
from fedskew.methods.fedproc import FedProc
from fedskew.methods.fedproto import FedProto
from fedskew.methods.fedprox import FedProx
from fedskew.methods.fedrep import FedRep
from fedskew.methods.finetune import FineTune
from fedskew.methods.local import Local
from fedskew.methods.moon import MOON
from fedskew.methods.ratioloss import RatioLoss
from fedskew.methods.scaffold import SCAFFOLD
from fedskew.methods.taunorm import TauNorm
from fedskew.methods.vhl import VHL

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
    "vhl": VHL,
    "fedgen": FedGen,
    "ccvr": CCVR,
    "fedfocal": FedFocal,
    "taunorm": TauNorm,
    "ratioloss": RatioLoss,
    "feddf": FedDF,
    "fedbe": FedBE,
    "fedic": FEDIC,
    "creff": CReFF,
    "fedbabu": FedBABU,
    "fedper": FedPer,
    "fedrep": FedRep,
    "ditto": Ditto,
    "fedcd": FedCD,
    "fedddc": FedDDC,
    "fedmr": FedMR,
    "fedcrc": FedCRC,
    "fedpg": FedPG,
    "local": Local,
    "central": Central,
    "finetune": FineTune,
}
