"""The page of results, written from the committed records alone.

For each reproduction it shows the published and the measured figures, and which claims agree.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from fairfleet.common.errors import UsageError
from fairfleet.lab.experiments.run_log import Ledger, Run
from fairfleet.lab.experiments.sweep_runner import EARLIER_READING, earlier_runs, recorded_runs
from fairfleet.lab.reproductions import REPRODUCTIONS
from fairfleet.lab.reproductions.authors import authors_runs
from fairfleet.lab.reproductions.base import Column, Reproduction, TableLine

SHOWN = ("mean", "pareto")  # The kinds of pictures on the page.
OPENING = """# Results

This page compares published tables with our own runs. `fairfleet reproduce NAME` runs a table, and
`fairfleet reproduce --page docs/explanation/results.md` writes this page from the records in
`results/`. A recorded run is not run again, so the tables fill up over days.

Each cell has the measured figure, mean ± standard deviation over the seeds, and the published
figure in brackets. Accuracies are on each client's own test data. Times are wall-clock times on a
machine with two cores, on which other programs ran. They say how long a run took, not how much
processor time it needs.
"""
AUTHORS = "The authors' own program on the same data, with the published figures in brackets:"


def format_figure(line: TableLine, column: Column) -> str:
    """Return the measured figure with its deviation, and the published one in brackets."""
    measured = line.measured[column.name].format(column.digits)
    published = line.published.get(column.name)
    return measured if published is None else f"{measured} ({published:.{column.digits}f})"


def write_page(path: Path, results: Path) -> str:
    """Write the page and its pictures, and return a sentence about what was written.

    Raises UsageError if `results` contains no records.
    """
    if not any((results / f"{name}.jsonl").exists() for name in REPRODUCTIONS):
        raise UsageError(
            f"there are no records in {results}: nothing is written; --results says where they are"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.open("ab").close()  # Fails early, before the pictures are drawn, if it is not writable.
    sections, pictures = [OPENING], path.parent / "images"
    for table in REPRODUCTIONS.values():
        runs = complete_runs(table, results)
        theirs = authors_runs(table.name, results)
        sections.append("\n".join(section_lines(table, runs, theirs, pictures if runs else None)))
    path.write_text("\n".join(sections), encoding="utf-8")
    return f"{path}: {len(REPRODUCTIONS)} tables"


def complete_runs(reproduction: Reproduction, results: Path) -> list[Run]:
    """Return the recorded runs of a reproduction that are complete, those of earlier readings too.

    The runs of earlier readings come last.
    """
    ledger = Ledger(results / f"{reproduction.name}.jsonl")
    planned = list(reproduction.sweep.planned())
    runs = recorded_runs(planned, ledger) + earlier_runs(planned, ledger)
    return [run for run in runs if run.complete]


def section_lines(
    reproduction: Reproduction, runs: Sequence[Run], theirs: Sequence[Run], pictures: Path | None
) -> Iterator[str]:
    """Yield the lines of one section; `theirs` are runs of the authors' code.

    Pictures are drawn into the folder `pictures`, if there is one.
    """
    lines = reproduction.lines(runs)
    yield _heading(reproduction, lines)
    if not lines:
        yield "Not run yet.\n"
        return
    yield from table_lines(reproduction, lines)
    yield ""
    for verdict in reproduction.verdicts(lines):
        yield f"- {'agrees' if verdict.holds else '**differs**'}: {verdict.words}"
    if theirs:
        yield f"\n{AUTHORS}\n"
        yield from table_lines(reproduction, reproduction.lines(theirs))
    for note in reproduction.notes:
        yield f"\n{_wrapped(note)}"
    if pictures:
        yield _pictures(reproduction, runs, pictures)
    yield ""


def _heading(reproduction: Reproduction, lines: Sequence[TableLine]) -> str:
    seeds = max((line.seeds for line in lines), default=0)
    command = f"fairfleet reproduce {reproduction.name}" + (f" --seeds {seeds}" if seeds else "")
    about = _wrapped(reproduction.about)
    return f"## {reproduction.title}\n\n{about}\n\n```\n{command}\n```\n"


def _pictures(reproduction: Reproduction, runs: Sequence[Run], folder: Path) -> str:
    from fairfleet.lab.reports import png_charts

    present = [run for run in runs if EARLIER_READING not in run.label]
    drawn = [run for run in present if run.label not in reproduction.not_drawn]
    files = png_charts.draw(drawn, folder, reproduction.name, SHOWN) if drawn else []
    return "\n" + "\n".join(
        f"![{reproduction.title}: {file.stem}](images/{file.name})" for file in files
    )


def table_lines(reproduction: Reproduction, lines: Sequence[TableLine]) -> Iterator[str]:
    """Yield the lines of a Markdown table; the setting is a column if a line has one."""
    has_settings = any(line.setting for line in lines)
    headings = [
        *(["setting"] if has_settings else []),
        "rule",
        "seeds",
        *(column.name for column in reproduction.columns),
        "seconds a run",
    ]
    yield f"| {' | '.join(headings)} |"
    yield f"|{'---|' * len(headings)}"
    for line in lines:
        cells = [
            *([line.setting] if has_settings else []),
            line.label,
            str(line.seeds),
            *(format_figure(line, column) for column in reproduction.columns),
            f"{line.seconds:.0f}",
        ]
        yield f"| {' | '.join(cells)} |"


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)
