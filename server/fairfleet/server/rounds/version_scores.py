"""Compare the versions of a model by one measure, from what clients report about them.

`VersionScores` knows which measures are reported, in which direction each is better, and how the
worst-served tenth of clients does by each. Nothing here has a clock or a disk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Set

from fairfleet.common.errors import BadRequest, short
from fairfleet.common.fairness import worst
from fairfleet.common.reports import Better, Evaluation
from fairfleet.server.rounds.measure_choice import AUTO_MEASURE, MeasureChoice
from fairfleet.server.rounds.stopping import StopConditions

MAX_NAMES = 64  # measures of all clients together, beside loss and accuracy


class VersionScores:
    """What clients reported about versions of the model, and the measure that compares them."""

    def __init__(self, setting: str = AUTO_MEASURE) -> None:
        """`setting` is that of `measure`; raises ValueError if it is not usable."""
        choice = MeasureChoice.of(setting)
        self._setting = choice.name
        self._fixed = choice.directions()  # by measure: declared or known, whatever is reported
        # By measure: the fixed direction, or that in the first evaluation recorded with it.
        self._directions = dict(self._fixed)
        self._names = set[str]()  # measures of the tasks' own that were recorded
        self._counts: Counter[str] = Counter()  # evaluations that have a measure
        self._evaluations = 0
        self._worst: dict[int, dict[str, float]] = {}  # by version and measure
        # The newest version and its values so far, by measure and client.
        self._newest: tuple[int, dict[str, dict[str, float]]] = (0, {})
        self._newest_worst: dict[str, float] | None = None  # None: to be computed

    # ---- what clients report -------------------------------------------------------------------

    def accepted(self, client: str, evaluation: Evaluation) -> Evaluation:
        """Return an evaluation as it is to be recorded.

        Names beyond the bound of the federation are left out, but not the chosen or known ones.
        Raises BadRequest if a measure has another direction than in the federation.
        """
        named = evaluation.measures | evaluation.personal_measures
        for name, measure in named.items():
            direction = self._directions.get(name, measure.direction)
            if measure.direction != direction:
                raise BadRequest(
                    f"client {client} reports {name} as a measure of which {measure.direction} "
                    f"values are better; in this federation {direction} values of {name} are. "
                    "Give it this direction in Task.evaluate, or another name."
                )
        refused = set(named) - self._names_with_room(named)
        return _without(evaluation, refused) if refused else evaluation

    def _names_with_room(self, named: Iterable[str]) -> set[str]:
        """Return which names can be recorded; the chosen and known ones always can."""
        always = {self._setting, *self._fixed, *self._names}
        new = [name for name in named if name not in always]
        return always | set(new[: max(0, MAX_NAMES - len(self._names))])

    def begin(self, version: int) -> None:
        """Begin the evaluation of a version, of which perhaps no client has a result."""
        self._close_newest()
        self._newest = (version, {})

    def add(self, version: int, client: str, evaluation: Evaluation) -> None:
        """Count a recorded evaluation. Versions come in order."""
        if self._newest[0] != version:
            self.begin(version)
        self._evaluations += 1
        self._newest_worst = None
        for name, figure in evaluation.figures().items():
            self._counts[name] += 1
            self._newest[1].setdefault(name, {})[client] = figure.value
        for name, measure in (evaluation.measures | evaluation.personal_measures).items():
            self._names.add(name)
            self._directions.setdefault(name, measure.direction)

    def _close_newest(self) -> None:
        if self._newest[1]:
            self._worst[self._newest[0]] = self._newest_tenths()
        self._newest, self._newest_worst = (self._newest[0], {}), None

    def _newest_tenths(self) -> dict[str, float]:
        """Return the mean over the worst-served tenth of the newest version, by measure."""
        if self._newest_worst is None:
            self._newest_worst = {
                name: worst(
                    list(values.values()),
                    10,
                    higher_is_better=self.direction_of(name) == "higher",
                )
                for name, values in self._newest[1].items()
            }
        return self._newest_worst

    # ---- the measure ---------------------------------------------------------------------------

    @property
    def measure(self) -> str:
        """The measure by which versions are compared; empty while it is not known.

        `auto` is accuracy if at least half of the evaluations have one, else loss, else the only
        other measure that so many have.
        """
        if self._setting != AUTO_MEASURE:
            return self._setting
        common = [name for name, count in self._counts.items() if 2 * count >= self._evaluations]
        built_in = [name for name in ("accuracy", "loss") if name in common]
        return built_in[0] if built_in else common[0] if len(common) == 1 else ""

    @property
    def direction(self) -> Better:
        """Which values of the measure are better; "lower" while it is not known."""
        return self.direction_of(self.measure)

    def direction_of(self, name: str) -> Better:
        """Return which values of a measure are better; "lower" if it was never reported."""
        return self._directions.get(name, "lower")

    def worst_tenths(self, after: int = -1, until: int | None = None) -> list[float]:
        """Return the measure's mean over the worst-served tenth, by evaluated version in order.

        Only versions `after` one and `until` another count, if they are given.
        """
        name, by_version = self.measure, {**self._worst, self._newest[0]: self._newest_tenths()}
        counted = (v for v in sorted(by_version) if v > after and (until is None or v <= until))
        rows = (by_version[version] for version in counted)
        return [row[name] for row in rows if name in row]

    # ---- stopping rules ------------------------------------------------------------------------

    def why_never(self, conditions: StopConditions) -> str:
        """Return why a stopping rule can never apply, and what to do; empty if none is useless.

        Before the first evaluation nothing is known.
        """
        rules = conditions.on_evaluations()
        if not self._evaluations or not rules:
            return ""
        needed = self.measure
        if self._setting == AUTO_MEASURE and conditions.worst_10_percent is not None:
            # A target has a measure's own unit. With `auto` that is the unit of an accuracy.
            needed, rules = "accuracy", ("end.worst_10_percent",)
        if needed and (
            needed == self.measure if self._setting == AUTO_MEASURE else self._counts[needed]
        ):
            return ""
        reported = ", ".join(sorted(self._counts)[:16])
        return (
            f"{' and '.join(rules)} can never apply: no client reports "
            f"{needed or 'an accuracy or a loss'}; reported: {reported}. Set `measure` to one of "
            "these and restart the server, or remove the stopping rule"
        )


def _without(evaluation: Evaluation, names: Set[str]) -> Evaluation:
    """Return an evaluation without these measures; raise BadRequest if nothing is left."""
    kept, kept_personal = (
        {name: measure for name, measure in measures.items() if name not in names}
        for measures in (evaluation.measures, evaluation.personal_measures)
    )
    if evaluation.loss is None and evaluation.accuracy is None and not kept:
        raise BadRequest(
            f"the clients of this federation report {MAX_NAMES} measures already, and "
            f"{short(', '.join(sorted(names)), 200)} are further ones; report one of those, or a "
            "loss"
        )
    return evaluation.model_copy(update={"measures": kept, "personal_measures": kept_personal})
