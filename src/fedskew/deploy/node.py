"""One site of a run: it answers the requests of a server. Its data and its net stay loaded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch

from fedskew.core.settings import UsageError
from fedskew.core.tensors import Payload
from fedskew.core.text import clean
from fedskew.data.dataset import DataSet
from fedskew.data.sources.loading import load
from fedskew.deploy import handshake
from fedskew.deploy.audit import Audit
from fedskew.deploy.flower.frames import Header
from fedskew.deploy.limits import TimeIsUp, time_limit
from fedskew.deploy.messages import OWN_DATA, Answer, Request, SiteFacts, as_header, plain_counts, plain_score, read
from fedskew.deploy.policy import Consent, Policy, Refusal, read_experiment, with_stand_in
from fedskew.deploy.profile import told_counts
from fedskew.deploy.states import States
from fedskew.evaluation.scores import ClientScore
from fedskew.experiment.assemble import assemble
from fedskew.experiment.config import Experiment
from fedskew.experiment.run_directory import versions
from fedskew.federation.intake import expected_layout
from fedskew.federation.private import shortened
from fedskew.federation.simulate.jobs import Job, Lost, Result, Trained, perform
from fedskew.federation.store import Blob, Damaged
from fedskew.federation.wire import decode_from_peer, digest, encode, layout_of
from fedskew.federation.world import World

MOST_TENSORS = 100_000  # in a broadcast; efficientnet-b0 has about 700


class Node:
    """Answers the requests of a server. An answer depends only on the request, the data and the states on disk.

    Args:
        data: a path or the name of a data set. Only these data are loaded, whatever a request names.
        states: the client states of this site.
        name: the name of the site.
        data_dir: where named data sets are; None is the default folder.
        device: where the net is trained.
        policy: the limits of what a server may ask for.
        loaded: the data, if they are loaded already.
    """

    def __init__(
        self,
        data: str,
        states: States,
        *,
        name: str = "",
        data_dir: Path | None = None,
        device: str = "cpu",
        policy: Policy | None = None,
        loaded: DataSet | None = None,
    ) -> None:
        self.data, self.states, self.name, self.data_dir, self.device = data, states, name, data_dir, device
        self.policy = policy or Policy()
        self.consent = Consent(self.policy, states.folder)
        self.audit = Audit(states.folder)
        self.loaded = loaded
        self.cached: tuple[str, World] | None = None  # the world of the last request, and the settings that made it
        self.notes: list[str] = []  # for this site's operator only: reasons in full, what was agreed to

    def reply(self, header: Header, blob: bytes) -> tuple[Answer, Blob]:
        """(answer, payload of the update) to one request. Any error becomes an answer, so that the site stays up.

        The server is told the reason only if it says nothing about this machine; `notes` has it in full.
        """
        request: Request | None = None
        try:
            with time_limit(self.policy.seconds):
                request = self._read(header)
                answer, payload = self._answer(request, blob)
        except TimeIsUp:
            answer, payload = Answer(lost=f"took longer than the {self.policy.seconds:g} s that this site allows"), b""
        except (Refusal, Damaged) as refusal:
            answer, payload = Answer(lost=f"cannot take part: {clean(refusal)}"), b""
        except Exception as error:  # a server may send anything
            self.notes.append(f"cannot take part: {type(error).__name__}: {clean(error)}")
            reason = f"cannot take part: its log has the reason ({type(error).__name__})"
            answer, payload = Answer(lost=reason), b""
        if answer.lost:
            self.notes.append(answer.lost)
        answer.name = self.name
        if request is not None:
            answer.run, answer.round = request.run, request.round
        return answer, payload

    @staticmethod
    def _read(header: Header) -> Request:
        try:
            return read(header, Request)
        except (ValueError, RecursionError) as error:
            raise Refusal(f"the request is invalid: {clean(error)}") from None

    def _answer(self, request: Request, blob: bytes) -> tuple[Answer, Blob]:
        if request.kind == "work":
            try:
                broadcast = decode_from_peer(blob, MOST_TENSORS)
            except ValueError as error:
                raise Refusal(str(error)) from None
            return self._work(request, broadcast)
        if request.kind == "hello":
            experiment = self._agree(request)
            return Answer(versions=versions(), facts=self._facts(request, experiment)), b""
        return Answer(), b""

    def _agree(self, request: Request) -> Experiment:
        """The experiment of a request; Refusal if this site does not serve it, or has other data."""
        self._uses_own_data(request)
        if not request.settings:
            raise Refusal("the request does not contain the experiment")
        experiment = read_experiment(request.settings, self.policy)
        if note := self.consent.check(request.settings, experiment):
            self.notes.append(note)
        if other := [f"{k} {v}" for k, v in request.versions.items() if versions().get(k) not in (v, None)]:
            self.notes.append(clean(f"the server has {', '.join(other)}: results may not be bit-identical"))
        return experiment

    def _facts(self, request: Request, experiment: Experiment) -> SiteFacts | None:
        data = self._own_data()  # loaded at once: the first round should not wait for it
        if not self._uses_own_data(request):
            return None
        facts = handshake.facts_of(data)
        if request.profile and self.policy.profile:
            facts.counts = told_counts(data.y_train, data.classes, experiment.privacy.min_count or 1)
            self.notes.append(f"tells the server its label counts, {sum(facts.counts)} of {facts.samples} samples")
        elif request.profile:
            self.notes.append("the server asks for label counts; they stay here (--allow-profile would send them)")
        return facts

    def _uses_own_data(self, request: Request) -> bool:
        """Whether sites bring their own data in this run; if not, they must be those that the run splits."""
        if request.data == OWN_DATA:
            return True
        if self.data != request.data:
            self.notes.append(clean(f"this run splits {request.data}, but this site joined with --data {self.data}"))
            raise Refusal(f"this run splits {clean(request.data)}, but this site joined with other data")
        return False

    def _own_data(self) -> DataSet:
        if self.loaded is None:
            self.loaded = load(self.data, self.data_dir)
        return self.loaded

    def world(self, request: Request) -> World:
        """The world of the request's settings; cached until a request has other settings."""
        settings = Request(
            "work",
            "00000000",
            request.data,
            request.client,
            request.sites,
            settings=request.settings,
            task=request.task,
        )
        key = json.dumps(as_header(settings))
        if self.cached is None or self.cached[0] != key:
            self.cached = (key, self._make_world(request, self._agree(request)))
        return self.cached[1]

    def _make_world(self, request: Request, experiment: Experiment) -> World:
        task = request.task if self._uses_own_data(request) else None
        if request.data == OWN_DATA and task is None:
            raise Refusal("the request does not contain the common task of the sites")
        data = replace(self._own_data(), name="this site's data")  # what a refusal says goes to the server
        try:
            self.policy.check_net(experiment, data if task is None else handshake.relabelled(data, task))
            if task is None:
                world = assemble(with_stand_in(experiment, data), device=self.device).world
            else:
                world = handshake.site_world(experiment, task, data, request.client, request.sites, self.device)
        except UsageError as error:
            raise Refusal(clean(error).removesuffix(".")) from None
        if world.population != request.sites:
            raise Refusal(f"the split has {world.population} clients, but there are {request.sites} sites")
        if not 0 <= request.client < request.sites:
            raise Refusal(f"client {request.client} is not one of {request.sites} sites")
        if digest(world.initial) != request.initial:
            installed = ", ".join(f"{name} {version}" for name, version in versions().items())
            raise Refusal(
                f"its initial model differs from the server's although the settings are the same; it has {installed}"
            )
        return world

    def _work(self, request: Request, broadcast: Payload) -> tuple[Answer, Blob]:
        world = self.world(request)
        self._check_round(request, world)
        state = self.states.get(request.run, request.base)
        answer = Answer()
        client = request.client
        if request.evaluate_round >= 0:
            job = Job("evaluate_client", request.evaluate_round, "evaluate", client, trained=request.base >= 0)
            score = self._perform(world, job, broadcast, state)
            if isinstance(score, ClientScore) and self.policy.counts:
                answer.shared, answer.personal = plain_score(score.shared), plain_score(score.personal)
                answer.counts = plain_counts(score) if request.counts else []
        if not request.train:
            return answer, b""
        if not len(world.train[client]):
            answer.lost = "has no training data"
            return answer, b""
        if self.policy.groups or self.policy.clip is not None:  # before it spends time on what may not leave
            site = world.site(client, request.round, request.stage)
            self.policy.check_layout(expected_layout(world.method, site, broadcast))
        result = self._perform(world, Job("train", request.round, request.stage, client), broadcast, state)
        if isinstance(result, Lost):
            self.notes.append(clean(result.why))
            answer.lost = ": ".join(clean(result.why).split(": ")[:2])  # "failed: TypeError"; the rest may name files
            return answer, b""
        assert isinstance(result, Trained)
        self.policy.check_layout(layout_of(result.update.payload))
        payload, clip = result.update.payload, self.policy.clip
        if clip is not None:
            payload, norm = shortened(payload, broadcast, clip)
            answer.clipped = norm > clip
            self.notes.append(f"round {request.round + 1}: the norm of the update is {norm:.3g}, at most {clip:g} left")
        self.states.settle(request.run, request.base, request.keep)
        self.states.put(request.run, request.round, result.state_blob())
        answer.weight, answer.seconds = result.update.weight, result.seconds
        allowed = self.policy.metrics
        answer.metrics = {k: v for k, v in result.update.metrics.items() if allowed is None or k in allowed}
        return answer, encode(payload)

    @staticmethod
    def _check_round(request: Request, world: World) -> None:
        """Raise Refusal if a round is not one of the experiment that was agreed to."""
        if max(request.round, request.evaluate_round) >= world.rounds:
            raise Refusal(f"the experiment has {world.rounds} rounds, not {request.round + 1}")

    @staticmethod
    def _perform(world: World, job: Job, broadcast: Payload, state: Blob) -> Result:
        torch.set_num_threads(1)  # the order of floating-point sums depends on the number of threads
        return perform(world, job, broadcast, state)
