"""Decides which versions of the model stay on the disk, and knows how the evaluated ones did.

The newest versions, the initial one and the best evaluated one are kept. The decision is made from
the recorded evaluations at each commit, and is part of its transaction. So a crash between an
evaluation and the next commit changes nothing. A version is evaluated while it is the newest, which
is always kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fairfleet.common.errors import short
from fairfleet.common.reports import Better, Evaluation
from fairfleet.server.rounds.version_ranking import (
    VersionScore,
    best_version,
    chosen_measure,
    version_scores,
)
from fairfleet.server.storage.evaluation_queries import evaluations_of_kept_models
from fairfleet.server.storage.model_table import ModelTable

INITIAL = 0
NO_SCORES: Mapping[str, VersionScore] = {}


class KeptVersions:
    """The versions whose models are on the disk, with their scores."""

    def __init__(
        self,
        store: ModelTable,
        keep: int,
        measure: Callable[[], str] = lambda: "",
        direction_of: Callable[[str], Better] | None = None,
    ) -> None:
        """`keep` is how many of the newest versions are kept. `reload` comes first.

        `measure` returns by what versions are compared; empty: by accuracy, else by loss.
        `direction_of` returns which values of a measure are better; None: the reports say so.
        """
        self._direction_of = direction_of
        self._store, self._keep, self._measure = store, keep, measure
        self._versions = set[int]()
        self._scores: dict[int, Mapping[str, VersionScore]] = {}
        self._evaluated, self._reported = INITIAL, list[Evaluation]()

    def reload(self) -> None:
        """Read from the database which versions are kept, and their evaluations."""
        self._versions = {stored.version for stored in self._store.kept_models()}
        evaluations = evaluations_of_kept_models(self._store)
        self._scores = {
            version: version_scores(row, self._direction_of) for version, row in evaluations.items()
        }
        # The evaluation of the newest version may still be under way.
        self._evaluated = max(evaluations, default=INITIAL)
        self._reported = evaluations.get(self._evaluated, [])

    def evaluated(self, version: int, evaluation: Evaluation) -> None:
        """Count a client's evaluation of the newest version."""
        if version != self._evaluated:
            self._evaluated, self._reported = version, []
        self._reported.append(evaluation)
        self._scores[version] = {}  # to be computed again

    def measure(self) -> str | None:
        """Return the measure by which versions are compared; None if nothing was evaluated."""
        return self._measure() or chosen_measure(self.scores(version) for version in self._scores)

    def scores(self, version: int) -> Mapping[str, VersionScore]:
        """Return the scores of a version by measure; empty if it was not evaluated."""
        if version == self._evaluated and not self._scores.get(version, True):
            self._scores[version] = version_scores(self._reported, self._direction_of)
        return self._scores.get(version, NO_SCORES)

    def best(self, under_evaluation: int | None = None) -> int | None:
        """Return the best evaluated version; None if there is none.

        A version whose evaluation is not over yet does not count.
        """
        complete = self._complete(under_evaluation)
        measure = self._measure() or chosen_measure(complete.values())
        return None if measure is None else best_version(complete, measure)

    def _complete(self, under_evaluation: int | None) -> dict[int, Mapping[str, VersionScore]]:
        """Return the scores of the kept versions whose evaluation is over."""
        return {
            version: self.scores(version)
            for version in self._scores
            if version in self._versions and version != under_evaluation
        }

    def why_no_best(self, under_evaluation: int | None = None) -> str:
        """Return why evaluated versions cannot be compared; empty if they can, or without any."""
        scores = self._complete(under_evaluation).values()
        reported = sorted({measure for of_version in scores for measure in of_version})
        if not reported or self.best(under_evaluation) is not None:
            return ""
        return (
            f"clients report no {self._measure() or 'accuracy and no loss'}, but "
            f"{short(', '.join(reported), 200)}. Set `measure` to one of these and restart the "
            "server"
        )

    def pinned(self) -> set[int]:
        """Return the versions that stay however many follow them: the initial and the best one."""
        best = self.best()
        return {INITIAL} if best is None else {INITIAL, best}

    def commit(self, version: int, pinned: set[int]) -> list[int]:
        """Count a committed version; return the versions whose files are not kept any more."""
        self._versions.add(version)
        released = {old for old in self._versions if old <= version - self._keep} - pinned
        self._versions -= released
        for old in released:
            self._scores.pop(old, None)
        return sorted(released)

    def reasons(self, version: int, newest: int, best: int | None) -> list[str]:
        """Return why a version is kept; `expiring` until the next commit, without any reason."""
        reasons = {
            "newest": version == newest,
            "best": version == best,
            "initial": version == INITIAL,
            "recent": newest - self._keep < version < newest,
        }
        return [reason for reason, holds in reasons.items() if holds] or ["expiring"]
