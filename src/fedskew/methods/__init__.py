"""Every method, by class name and in `REGISTRY` by its name in lower case. A new method is one import line here."""

from fedskew.core.method import Method as _Method
from fedskew.methods.ccvr import CCVR as CCVR
from fedskew.methods.central import Central as Central
from fedskew.methods.creff import CReFF as CReFF
from fedskew.methods.ditto import Ditto as Ditto
from fedskew.methods.fedadagrad import FedAdagrad as FedAdagrad
from fedskew.methods.fedadam import FedAdam as FedAdam
from fedskew.methods.fedala import FedALA as FedALA
from fedskew.methods.fedavg import FedAvg as FedAvg
from fedskew.methods.fedavgm import FedAvgM as FedAvgM
from fedskew.methods.fedbabu import FedBABU as FedBABU
from fedskew.methods.fedbe import FedBE as FedBE
from fedskew.methods.fedbn import FedBN as FedBN
from fedskew.methods.fedcd import FedCD as FedCD
from fedskew.methods.fedcrc import FedCRC as FedCRC
from fedskew.methods.feddc import FedDC as FedDC
from fedskew.methods.fedddc import FedDDC as FedDDC
from fedskew.methods.feddf import FedDF as FedDF
from fedskew.methods.feddyn import FedDyn as FedDyn
from fedskew.methods.fedexp import FedExP as FedExP
from fedskew.methods.fedfocal import FedFocal as FedFocal
from fedskew.methods.fedgen import FedGen as FedGen
from fedskew.methods.fedic import FEDIC as FEDIC
from fedskew.methods.fedlc import FedLC as FedLC
from fedskew.methods.fedmr import FedMR as FedMR
from fedskew.methods.fedncm import FedNCM as FedNCM
from fedskew.methods.fednova import FedNova as FedNova
from fedskew.methods.fedntd import FedNTD as FedNTD
from fedskew.methods.fedper import FedPer as FedPer
from fedskew.methods.fedpg import FedPG as FedPG
from fedskew.methods.fedproc import FedProc as FedProc
from fedskew.methods.fedproto import FedProto as FedProto
from fedskew.methods.fedprox import FedProx as FedProx
from fedskew.methods.fedrep import FedRep as FedRep
from fedskew.methods.fedrod import FedRoD as FedRoD
from fedskew.methods.fedrs import FedRS as FedRS
from fedskew.methods.fedyogi import FedYogi as FedYogi
from fedskew.methods.finetune import FineTune as FineTune
from fedskew.methods.ifca import IFCA as IFCA
from fedskew.methods.local import Local as Local
from fedskew.methods.moon import MOON as MOON
from fedskew.methods.publiconly import PublicOnly as PublicOnly
from fedskew.methods.ratioloss import RatioLoss as RatioLoss
from fedskew.methods.scaffold import SCAFFOLD as SCAFFOLD
from fedskew.methods.taunorm import TauNorm as TauNorm
from fedskew.methods.vhl import VHL as VHL

REGISTRY: dict[str, type[_Method]] = {
    name.lower(): kind
    for name, kind in list(globals().items())
    if isinstance(kind, type) and issubclass(kind, _Method) and kind is not _Method
}
