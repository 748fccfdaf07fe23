"""The HTML report of a comparison: one file that works offline.

It contains the tables, the charts and plotly's own script, so a browser fetches nothing.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from fairfleet.lab.experiments.experiment import Experiment
from fairfleet.lab.experiments.run_log import Run
from fairfleet.lab.experiments.sweep import DEFAULT_NAME
from fairfleet.lab.reports import chart_data
from fairfleet.lab.reports.result_rows import failed_runs, measures_shown, result_rows

NEUTRAL = {"learning_rate_decay": 1.0}  # fields of a plan that then change nothing
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1150px; margin: 2em auto; padding: 0 1em;
  color: #222; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 1em 0; }
th, td { padding: .25em .8em; text-align: right; border-bottom: 1px solid #ddd;
  white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.wide { overflow-x: auto; }
.facts th, .facts td { text-align: left; white-space: normal; vertical-align: top; }
"""
LEGEND = """\
Accuracies in percent, on each client's own test data; mean ± standard deviation over the seeds.
Bands in the curves reach from the lowest to the highest seed. ρ: share of a round's clients whose
training loss did not rise in the round; strict ρ: share of those whose training loss fell. In
records from before version 0.2.0 both are the latter."""
# Field of a point, title, factor.
CURVES = (
    ("mean", "Average accuracy over the rounds (%)", 100.0),
    ("worst_5", "Accuracy of the worst 5 % of the clients (%)", 100.0),
    ("loss", "Training loss of the rounds' clients, on the models they received", 1.0),
    ("conflicts", "Conflicts: share of a round's clients that the direction would harm (%)", 100.0),
)


def page(title: str, runs: Sequence[Run], remark: str = "", command: str = "") -> str:
    """Return the report as HTML, with one section per setting; `command` makes it again."""
    sections = "\n".join(
        _section(setting, [run for run in runs if run.setting == setting])
        for setting in chart_data.settings(runs)
    )
    name, script = html.escape(title), get_plotlyjs()
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{name}</title><style>{STYLE}</style><script>{script}</script></head>
<body><h1>{name}</h1><p>{html.escape(remark)}</p>
{_facts(runs, command)}
{sections}
<p>{LEGEND}</p>
</body></html>
"""


def title_of(name: str, runs: Sequence[Run]) -> str:
    """Return a title that names the data, and the comparison if it has a name of its own.

    >>> title_of("comparison", [])
    'Comparison of rules'
    """
    data = list(dict.fromkeys(run.experiment.data for run in runs))
    title = f"Comparison of rules on {', '.join(data)}" if data else "Comparison of rules"
    return title if name == DEFAULT_NAME else f"{title} ({name})"


def _facts(runs: Sequence[Run], command: str) -> str:
    """Return what was run, as a table: where runs differ, all values."""
    experiments = [run.experiment for run in runs]
    facts = {
        "data": [f"{e.data}, partition {e.partition}" for e in experiments],
        "model": [run.experiment.model + _parameters(run) for run in runs],
        "plan": [", ".join(_plan_texts(e)) for e in experiments],
        "rounds": [f"{e.rounds}, {_clients_text(e)}" for e in experiments],
        "fairfleet": [run.made_by or "unknown" for run in runs],
        "command": [command] if command else [],
    }
    lines = [
        f"<tr><th>{name}</th><td>{html.escape('; '.join(dict.fromkeys(values)))}</td></tr>"
        for name, values in facts.items()
        if values
    ]
    return f"<table class='facts'>{''.join(lines)}</table>"


def _parameters(run: Run) -> str:
    return f" ({run.parameters:,} parameters)" if run.parameters else ""


def _plan_texts(experiment: Experiment) -> list[str]:
    plan = experiment.plan.model_dump(mode="json")
    return [
        f"{name.replace('_', ' ')} {value}"
        for name, value in plan.items()
        if value and value != NEUTRAL.get(name) and not isinstance(value, dict)
    ]


def _clients_text(experiment: Experiment) -> str:
    every = experiment.clients_per_round
    return f"{every} clients per round" if every else "all clients in every round"


def _section(setting: str, runs: Sequence[Run]) -> str:
    heading = f"<h2>{html.escape(setting)}</h2>" if setting else ""
    charts = "\n".join(_embedded(figure) for figure in _figures(runs))
    failures = "".join(f"<li>failed: {html.escape(text)}</li>" for text in failed_runs(runs))
    return f"{heading}\n<div class='wide'>{_table(runs)}</div>\n<ul>{failures}</ul>\n{charts}"


def _figures(runs: Sequence[Run]) -> Iterator[go.Figure]:
    yield curve(runs, *CURVES[0])
    yield curve(runs, *CURVES[1])
    yield distributions(runs)
    yield pareto_plot(runs)
    yield curve(runs, *CURVES[2])
    yield curve(runs, *CURVES[3])


def curve(runs: Sequence[Run], field: str, title: str, scale: float) -> go.Figure:
    """Return the chart of one field of the points over the rounds, with bands over the seeds."""
    labels, figure = chart_data.labels(runs), go.Figure()
    for line in chart_data.lines(runs, field, scale):
        _add_line(figure, line, chart_data.colour(line.label, labels))
    is_accuracy = field in chart_data.ACCURACIES
    text = chart_data.accuracy_title(title, runs) if is_accuracy else title
    return _with_layout(figure, text, "round", "")


def _add_line(figure: go.Figure, line: chart_data.ChartLine, colour: str) -> None:
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
        x=line.rounds,
        y=line.middle,
        name=line.label,
        line={"color": colour},
        legendgroup=line.label,
    )


def distributions(runs: Sequence[Run]) -> go.Figure:
    """Return the chart of all final client accuracies, one violin per rule with a result."""
    labels, figure = chart_data.labels(runs), go.Figure()
    for label, accuracies in chart_data.accuracies(runs).items():
        figure.add_violin(
            y=accuracies,
            name=label,
            line={"color": chart_data.colour(label, labels)},
            box_visible=True,
            points="all",
            jitter=0.4,
            marker={"size": 2},
            spanmode="hard",
        )
    title = "Accuracy of every client at the end, all seeds (%)"
    return _with_layout(figure, chart_data.accuracy_title(title, runs), "", "")


def pareto_plot(runs: Sequence[Run]) -> go.Figure:
    """Return the chart of mean accuracy against the worst 5 %, with the Pareto front."""
    labels, figure, dots = chart_data.labels(runs), go.Figure(), chart_data.dots(runs)
    front = chart_data.pareto_front(dots)
    figure.add_scatter(
        x=[dot.average for dot in front],
        y=[dot.worst for dot in front],
        mode="lines",
        line={"color": "#bbb", "dash": "dot"},
        name="not beaten in both",
    )
    for dot in dots:
        figure.add_scatter(
            x=[dot.average],
            y=[dot.worst],
            error_x={"array": [dot.average_spread]},
            error_y={"array": [dot.worst_spread]},
            mode="markers",
            name=dot.label,
            marker={"color": chart_data.colour(dot.label, labels), "size": 10},
        )
    x, y = (chart_data.accuracy_title(title, runs) for title in ("average (%)", "worst 5 % (%)"))
    title = "Accuracy and fairness: further right and further up is better"
    return _with_layout(figure, title, x, y)


def _with_layout(figure: go.Figure, title: str, x: str, y: str) -> go.Figure:
    figure.update_layout(
        title=title,
        template="plotly_white",
        height=430,
        margin={"t": 50, "b": 50},
        xaxis_title=x,
        yaxis_title=y,
    )
    return figure


def _embedded(figure: go.Figure) -> str:
    return str(figure.to_html(full_html=False, include_plotlyjs=False))


def _table(runs: Sequence[Run]) -> str:
    rows = result_rows(runs)
    measures = measures_shown(rows)
    headings = ["rule", "seeds", *(html.escape(m.heading) for m in measures), "seconds a run"]
    lines = [
        f"<tr><td>{html.escape(row.label)}</td><td>{row.seeds_text}</td>"
        + "".join(f"<td>{row.measures[m.name].format(m.digits)}</td>" for m in measures)
        + f"<td>{row.seconds:.1f}</td></tr>"
        for row in rows
    ]
    heading_cells = "".join(f"<th>{heading}</th>" for heading in headings)
    return f"<table><tr>{heading_cells}</tr>{''.join(lines)}</table>"
