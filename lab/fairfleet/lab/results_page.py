"""The page of results, made from the committed records alone: what was published, what came out, what agrees."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from fairfleet.common.errors import UsageError
from fairfleet.lab.records import Ledger, Run
from fairfleet.lab.reproductions import REPRODUCTIONS
from fairfleet.lab.reproductions.authors import authors_runs
from fairfleet.lab.reproductions.base import Column, Line, Reproduction
from fairfleet.lab.sweep import finished

SHOWN = ("mean", "pareto")  # pictures on the page
OPENING = """# Results

Published tables, run again with `fairfleet reproduce NAME`. This page is made from the records in `results/` by
`fairfleet reproduce --page docs/results.md`; a run that is recorded is not run again, so the tables fill up over days.
Each cell is what came out here, mean ± standard deviation over the seeds, and in brackets what was published.
Accuracies are on every client's own test data. Times are on the wall, of a machine with two cores that did much else
beside and paused some runs: they say what was waited, not what the work takes.
"""
AUTHORS = "The authors' own program on the same data, with what was published in brackets:"


def figure_words(line: Line, column: Column) -> str:
    own = line.measured[column.name].words(column.digits)
    published = line.published.get(column.name)
    return own if published is None else f"{own} ({published:.{column.digits}f})"


def write_page(path: Path, results: Path) -> str:
    """Returns in words what was written."""
    if not any((results / f"{name}.jsonl").exists() for name in REPRODUCTIONS):
        raise UsageError(f"there are no records in {results}: nothing is written; --results says where they are")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.open("ab").close()  # before the pictures are drawn beside it
    sections, pictures = [OPENING], path.parent / "images"
    for one in REPRODUCTIONS.values():
        runs = recorded(one, results)
        sections.append("\n".join(section(one, runs, authors_runs(one.name, results), pictures if runs else None)))
    path.write_text("\n".join(sections), encoding="utf-8")
    return f"{path}: {len(REPRODUCTIONS)} tables"


def recorded(one: Reproduction, results: Path) -> list[Run]:
    found = finished(list(one.sweep.planned()), Ledger(results / f"{one.name}.jsonl"))
    return [run for run in found if run.complete]


def section(one: Reproduction, runs: Sequence[Run], theirs: Sequence[Run], pictures: Path | None) -> Iterator[str]:
    lines = one.lines(runs)
    seeds = max((line.seeds for line in lines), default=0)
    command = f"fairfleet reproduce {one.name}" + (f" --seeds {seeds}" if seeds else "")
    yield f"## {one.title}\n\n{_wrapped(one.about)}\n\n```\n{command}\n```\n"
    if not lines:
        yield "Not run yet.\n"
        return
    yield from table(one, lines)
    yield ""
    for verdict in one.verdicts(lines):
        yield f"- {'agrees' if verdict.holds else '**differs**'}: {verdict.words}"
    if theirs:
        yield f"\n{AUTHORS}\n"
        yield from table(one, one.lines(theirs))
    for note in one.notes:
        yield f"\n{_wrapped(note)}"
    if pictures:
        from fairfleet.lab import plots

        drawn = [run for run in runs if run.label not in one.not_drawn]
        made = plots.draw(drawn, pictures, one.name, SHOWN) if drawn else []
        yield "\n" + "\n".join(f"![{one.title}: {file.stem}](images/{file.name})" for file in made)
    yield ""


def table(one: Reproduction, lines: Sequence[Line]) -> Iterator[str]:
    settings = any(line.setting for line in lines)
    headings = [*(["setting"] if settings else []), "rule", "seeds", *(c.name for c in one.columns), "seconds a run"]
    yield f"| {' | '.join(headings)} |"
    yield f"|{'---|' * len(headings)}"
    for line in lines:
        figures = [figure_words(line, column) for column in one.columns]
        cells = [*([line.setting] if settings else []), line.label, str(line.seeds), *figures, f"{line.seconds:.0f}"]
        yield f"| {' | '.join(cells)} |"


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)
