"""The HTML report of a comparison: one file with everything in it, plotly's own script included; nothing is fetched."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from fairfleet.lab import figures, tables
from fairfleet.lab.records import Run

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1150px; margin: 2em auto; padding: 0 1em; color: #222; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 1em 0; }
th, td { padding: .25em .8em; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.wide { overflow-x: auto; }
"""
CURVES = (
    ("mean", "Average accuracy over the rounds (%)", 100.0),
    ("worst_5", "Accuracy of the worst 5 % of the clients (%)", 100.0),
    ("loss", "Training loss of the rounds' clients, on the models they received", 1.0),
    ("conflicts", "Conflicts: share of a round's clients that the direction would harm (%)", 100.0),
)


def page(title: str, runs: Sequence[Run], remark: str = "") -> str:
    sections = "\n".join(
        _section(setting, [r for r in runs if r.setting == setting]) for setting in figures.settings(runs)
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{html.escape(title)}</title><style>{STYLE}</style><script>{get_plotlyjs()}</script></head>
<body><h1>{html.escape(title)}</h1><p>{html.escape(remark)}</p>
{sections}
<p>Accuracies in percent, on each client's own test data; mean ± standard deviation over the seeds. Bands in the
curves reach from the lowest to the highest seed. ρ: share of a round's clients whose training loss fell by it.</p>
</body></html>
"""


def _section(setting: str, runs: Sequence[Run]) -> str:
    heading = f"<h2>{html.escape(setting)}</h2>" if setting else ""
    drawn = "\n".join(_embedded(figure) for figure in _figures(runs))
    failed = "".join(f"<li>failed: {html.escape(words)}</li>" for words in tables.failures(runs))
    return f"{heading}\n<div class='wide'>{_table(runs)}</div>\n<ul>{failed}</ul>\n{drawn}"


def _figures(runs: Sequence[Run]) -> Iterator[go.Figure]:
    yield curve(runs, *CURVES[0])
    yield curve(runs, *CURVES[1])
    yield distributions(runs)
    yield pareto_plot(runs)
    yield curve(runs, *CURVES[2])
    yield curve(runs, *CURVES[3])


def curve(runs: Sequence[Run], field: str, title: str, scale: float) -> go.Figure:
    known, figure = figures.labels(runs), go.Figure()
    for line in figures.lines(runs, field, scale):
        colour = figures.colour(line.label, known)
        figure.add_scatter(
            x=line.rounds + line.rounds[::-1],
            y=line.high + line.low[::-1],
            mode="lines",
            fill="toself",
            fillcolor=colour,
            opacity=0.15,
            line={"width": 0},
            hoverinfo="skip",
            showlegend=False,
            legendgroup=line.label,
        )
        figure.add_scatter(
            x=line.rounds, y=line.middle, name=line.label, line={"color": colour}, legendgroup=line.label
        )
    return _laid_out(figure, figures.of_honest(title, runs) if field in figures.ACCURACIES else title, "round", "")


def distributions(runs: Sequence[Run]) -> go.Figure:
    known, figure = figures.labels(runs), go.Figure()
    for label, found in figures.accuracies(runs).items():
        figure.add_violin(
            y=found,
            name=label,
            line={"color": figures.colour(label, known)},
            box_visible=True,
            points="all",
            jitter=0.4,
            marker={"size": 2},
            spanmode="hard",
        )
    return _laid_out(figure, figures.of_honest("Accuracy of every client at the end, all seeds (%)", runs), "", "")


def pareto_plot(runs: Sequence[Run]) -> go.Figure:
    known, figure, found = figures.labels(runs), go.Figure(), figures.dots(runs)
    front = figures.pareto(found)
    figure.add_scatter(
        x=[dot.average for dot in front],
        y=[dot.worst for dot in front],
        mode="lines",
        line={"color": "#bbb", "dash": "dot"},
        name="not beaten in both",
    )
    for dot in found:
        figure.add_scatter(
            x=[dot.average],
            y=[dot.worst],
            error_x={"array": [dot.average_spread]},
            error_y={"array": [dot.worst_spread]},
            mode="markers",
            name=dot.label,
            marker={"color": figures.colour(dot.label, known), "size": 10},
        )
    x, y = (figures.of_honest(words, runs) for words in ("average (%)", "worst 5 % (%)"))
    return _laid_out(figure, "Accuracy and fairness: further right and further up is better", x, y)


def _laid_out(figure: go.Figure, title: str, x: str, y: str) -> go.Figure:
    figure.update_layout(
        title=title, template="plotly_white", height=430, margin={"t": 50, "b": 50}, xaxis_title=x, yaxis_title=y
    )
    return figure


def _embedded(figure: go.Figure) -> str:
    return str(figure.to_html(full_html=False, include_plotlyjs=False))


def _table(runs: Sequence[Run]) -> str:
    rows = tables.rows(runs)
    measures = tables.shown(rows)
    headings = "".join(f"<th>{html.escape(m.heading)}</th>" for m in measures)
    lines = [
        f"<tr><td>{html.escape(row.label)}</td><td>{row.seeds_words}</td>"
        + "".join(f"<td>{row.measures[m.name].words(m.digits)}</td>" for m in measures)
        + f"<td>{row.seconds:.1f}</td></tr>"
        for row in rows
    ]
    return f"<table><tr><th>rule</th><th>seeds</th>{headings}<th>seconds a run</th></tr>{''.join(lines)}</table>"
