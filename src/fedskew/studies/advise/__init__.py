"""Advice: which method to use on these data, found by a race on the clients' validation parts."""

from fedskew.studies.advise.advice import Advice as Advice
from fedskew.studies.advise.advice import Progress as Progress
from fedskew.studies.advise.advising import advise as advise
from fedskew.studies.advise.shortlist import Limits as Limits
