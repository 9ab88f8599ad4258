"""The sites of a served run: how many should join, what they agree on, and what the server knows of their data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fedskew.core.settings import UsageError
from fedskew.data.sources.loading import load
from fedskew.data.split.allotment import IntArray
from fedskew.data.split.skew import class_table
from fedskew.deploy import handshake, profile
from fedskew.deploy.agreed import Agreed
from fedskew.deploy.hosting import Hosting
from fedskew.deploy.messages import Answer, SiteFacts
from fedskew.deploy.roster import Roster
from fedskew.experiment.assemble import Assembled, Lineup, cohort_size_and_quorum
from fedskew.experiment.card import ModelCard, card_of
from fedskew.experiment.config import Experiment
from fedskew.experiment.run_directory import versions
from fedskew.experiment.skewness import skew_figures


@dataclass(frozen=True, kw_only=True)
class Membership:
    """The sites of a run and their data.

    `assembled` is the experiment with the data that the server splits; None: sites bring their own. `keys` are the
    names of the sites whose keys the server has. `agreed` is changed when sites join; `say` prints a line for the
    operator.
    """

    experiment: Experiment
    hosting: Hosting
    assembled: Assembled | None
    keys: Sequence[str]
    agreed: Agreed
    roster: Roster
    say: Callable[[str], None]

    @property
    def expected(self) -> int:
        """How many sites should join; 0 if that is not known."""
        split = self.assembled.world.population if self.assembled else 0
        return len(self.keys) or len(self.agreed.sites) or self.hosting.sites or split

    def joined(self, answers: Mapping[str, Answer]) -> str:
        """How many sites answered, in words."""
        return f"{len(answers)} of {self.expected} sites joined within {self.hosting.patience:g} s"

    def agree(self, answers: Mapping[str, Answer]) -> Mapping[str, Answer]:
        """Agree on the task with the sites that answered (name -> answer); returns the answers of those that fit.

        In a run whose sites are not known by keys, these are then the sites of the run.
        """
        facts = {name: answer.facts for name, answer in answers.items() if answer.facts is not None}
        if self.assembled is None and self.agreed.task is None:
            self.agreed.task = handshake.agree_without_misfits(facts, self.roster.refuse)
            answers = {name: answer for name, answer in answers.items() if name in facts}
        if self.agreed.task is not None and (filled := handshake.describe_filling(self.agreed.task, facts)):
            self.say(f"note: {filled}")
        for name, fact in facts.items():
            self._note_facts(name, fact)
        for name, answer in sorted(answers.items()):
            if other := [f"{k} {v}" for k, v in answer.versions.items() if versions().get(k) not in (v, None)]:
                self.say(f"site {name} has {', '.join(other)}: results may not be bit-identical")
        if not self.agreed.sites:
            if len(answers) < self.expected:
                raise UsageError(f"{self.joined(answers)}; give more time with --patience.")
            self.agreed.sites = sorted(answers)
        self.roster.names = self.agreed.sites
        if self.assembled is None and self.agreed.task is None:
            raise UsageError(f"no site joined within {self.hosting.patience:g} s; give more time with --patience.")
        return answers

    def lineup(self) -> Lineup:
        """The world of the run and the roles of its sites, once they have agreed."""
        count = len(self.agreed.sites)
        if self.assembled is not None:
            if self.assembled.world.population != count:
                raise UsageError(
                    f"the split has {self.assembled.world.population} clients, but there are {count} sites; "
                    f"give a split with clients={count}."
                )
            return self.assembled
        assert self.agreed.task is not None
        data = load(self.agreed.server_data, self.hosting.data_dir) if self.agreed.server_data else None
        clients = tuple(range(count))
        size, quorum = cohort_size_and_quorum(self.experiment, len(clients))
        return Lineup(
            world=handshake.server_world(self.experiment, self.agreed.task, data, count, "cpu"),
            members=clients,
            newcomers=(),
            evaluated=clients,
            cohort_size=size,
            quorum=quorum,
        )

    def card(self, lineup: Lineup) -> ModelCard:
        """The model card of the run."""
        if self.assembled is not None:
            labels, table = self.assembled.labels, self.assembled.table
        else:
            assert self.agreed.task is not None
            labels, table = self.agreed.task.labels, self.agreed.task.table
        return card_of(self.experiment, lineup.world, labels, table, tuple(self.agreed.sites))

    def samples(self, client: int) -> int | None:
        """The training samples of a client: what the split gave it, or what its site reported."""
        if self.assembled is not None:
            return len(self.assembled.world.train[client])
        name = self.agreed.sites[client]
        answer = self.roster.answers.get(name)
        if answer is not None and answer.facts is not None:
            self._note_facts(name, answer.facts)
        return self.agreed.samples.get(name, 0)

    def _note_facts(self, name: str, facts: SiteFacts) -> None:
        """Keep what a site reported about its data."""
        self.agreed.samples[name] = facts.samples
        if self.hosting.profile and facts.counts is not None:
            self.agreed.counts[name] = dict(zip(facts.labels, facts.counts, strict=True))

    def skew(self) -> dict[str, float | None]:
        """How skewed the clients are: by the split, or by what sites told about their labels."""
        if self.assembled is not None:
            return skew_figures(self.assembled)
        labels = self.agreed.task.labels if self.agreed.task is not None else ()
        samples = {name: self.agreed.samples.get(name, 0) for name in self.agreed.sites}
        return profile.skew_between(labels, self.agreed.counts, samples)

    def class_counts(self) -> tuple[IntArray, str] | None:
        """Samples of each client and class, with a note: by the split, or as sites told it; None if unknown."""
        if self.assembled is not None:
            data = self.assembled.data
            return class_table(self.assembled.partition, data.y_train, data.classes), ""
        if not self.agreed.counts or self.agreed.task is None:
            return None
        note = "As the sites told it; a class with few samples is told as none."
        if silent := self._silent():
            note += f" Not told by {', '.join(silent)}."
        return profile.told_table(self.agreed.task.labels, self.agreed.sites, self.agreed.counts), note

    def _silent(self) -> list[str]:
        """The sites that told no label counts."""
        return [name for name in self.agreed.sites if name not in self.agreed.counts]

    def describe_profile(self) -> str:
        """One line for the operator about the label counts that sites told."""
        return profile.describe(self.skew(), self._silent())
