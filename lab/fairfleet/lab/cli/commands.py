"""The flags of `fairfleet simulate`, `compare` and `reproduce`.

Each command imports its implementation when it is called. So `fairfleet --help` does not load
torch, and a command reports plainly if torch is missing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fairfleet.common.errors import UsageError
from fairfleet.common.extras import require
from fairfleet.lab.cli import options


def simulate_command(
    config: Annotated[
        Path | None, typer.Argument(help="YAML file with an experiment.", show_default=False)
    ] = None,
    data: options.Data = None,
    partition: options.PartitionSpec = None,
    clients: options.Clients = None,
    per_round: options.PerRound = None,
    model: options.ModelName = None,
    rule: Annotated[
        str | None,
        typer.Option(
            help="Rule: name or name,parameter=value,…; see `fairfleet rules`.",
            show_default="fedavg",
        ),
    ] = None,
    rounds: options.Rounds = None,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0, help="Seed of data, selection, batches and first model.", show_default="0"
        ),
    ] = None,
    set_: options.Settings = None,
    record: Annotated[
        Path | None,
        typer.Option(
            help="Add the run to this .jsonl file; a run recorded there is not repeated.",
            show_default="none",
        ),
    ] = None,
    tensorboard: Annotated[
        Path | None,
        typer.Option(
            help="Write the learning curve as TensorBoard event files to this folder.",
            show_default="off",
        ),
    ] = None,
    data_dir: options.DataDir = None,
    workers: options.Workers = 0,
    as_json: options.AsJson = False,
) -> None:
    """Train a fleet of simulated clients in one process.

    Uses the server's own rules and the client's own training. By default, trains the demo's ten
    clients. Flags override the fields of the YAML file.

    Examples:

      fairfleet simulate --rule fedlf

      fairfleet simulate --data cifar10 --partition dirichlet:0.1 --clients 50

      fairfleet simulate --rule afl --set behaviour.dropout=0.2

      fairfleet simulate experiment.yaml --seed 3 --record runs.jsonl
    """
    check_libraries("simulate")
    from fairfleet.lab.cli.simulate import simulate

    flags = options.experiment_flags(data, partition, clients, per_round, model, rounds, set_)
    flags |= {} if rule is None else {"rule": rule}
    flags |= {} if seed is None else {"seed": seed}
    simulate(config, flags, record, data_dir, workers, as_json, tensorboard)


def compare_command(
    config: Annotated[
        Path | None, typer.Argument(help="YAML file with a sweep.", show_default=False)
    ] = None,
    rule: Annotated[
        list[str] | None,
        typer.Option(
            help="Rule: name or name,parameter=value,…; repeat for each rule.",
            show_default="four rules: fedavg twice, fedfv and fedlf",
        ),
    ] = None,
    codec: Annotated[
        list[str] | None,
        typer.Option(
            help="Codec: raw32, int8, topk:0.1, …; repeat for each codec.",
            show_default="raw32",
        ),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Number of seeds, from 0 on.", show_default="3")
    ] = None,
    data: options.Data = None,
    partition: options.PartitionSpec = None,
    clients: options.Clients = None,
    per_round: options.PerRound = None,
    model: options.ModelName = None,
    rounds: options.Rounds = None,
    set_: options.Settings = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Folder for records, tables, report and charts.",
            show_default="fairfleet-results/NAME",
            rich_help_panel="Output",
        ),
    ] = None,
    data_dir: options.DataDir = None,
    workers: options.Workers = 0,
    pictures: Annotated[
        bool,
        typer.Option(
            help="Write the HTML report and PNG charts.",
            show_default="on",
            rich_help_panel="Output",
        ),
    ] = True,
    as_json: options.AsJson = False,
) -> None:
    """Compare rules, settings and codecs over several seeds.

    Runs every combination and shows accuracy, fairness and conflicts. A run that the output folder
    has is not repeated, so an interrupted comparison continues where it stopped.

    Accuracies are in percent; each measure is the mean over the seeds ± the standard deviation.
    With several codecs, a second table shows what each changes against raw32, seed by seed, ± the
    standard error.

    Examples:

      fairfleet compare

      fairfleet compare --rule fedavg --rule fedfv,alpha=0.1 --rule fedlf

      fairfleet compare --data cifar10 --partition pat:2 --clients 100

      fairfleet compare --rule fedlf --codec raw32 --codec int8 --codec topk:0.1

      fairfleet compare sweep.yaml --output results/my-sweep
    """
    check_libraries("compare")
    from fairfleet.lab.cli.compare import compare

    base = options.experiment_flags(data, partition, clients, per_round, model, rounds, set_)
    flags = {f"base.{path}": value for path, value in base.items()}
    flags |= {"rules": rule} if rule else {}
    flags |= {"codecs": codec} if codec else {}
    flags |= {"seeds": list(range(seeds))} if seeds else {}
    compare(config, flags, output, data_dir, workers, pictures, as_json)


def reproduce_command(
    name: Annotated[
        str | None,
        typer.Argument(help="Table, by name or letter; without it, all tables are listed."),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="Run a short version that takes about a minute.",
            show_default="off",
        ),
    ] = False,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Number of seeds to run.", show_default="2")
    ] = None,
    rule: Annotated[
        list[str] | None,
        typer.Option(
            help="Run only this rule, by its name in the table. May be repeated.",
            show_default="all",
        ),
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            help="Run only this setting, by its name in the table. May be repeated.",
            show_default="all",
        ),
    ] = None,
    results: Annotated[
        Path, typer.Option(help="Folder of the records; a run recorded there is not repeated.")
    ] = Path("results"),
    page: Annotated[
        Path | None,
        typer.Option(
            help="Run nothing; write all recorded results to this Markdown page.",
            show_default="none",
        ),
    ] = None,
    data_dir: options.DataDir = None,
    workers: options.Workers = 0,
    as_json: options.AsJson = False,
) -> None:
    """Run the experiment of a published table again.

    Prints both tables side by side. A long table can be stopped and continued: every finished run
    is recorded.

    Examples:

      fairfleet reproduce

      fairfleet reproduce fedfv-table3

      fairfleet reproduce A --quick

      fairfleet reproduce fedfv-table2 --seeds 3 --rule FedAvg --rule "FedFV τ=10"

      fairfleet reproduce --page docs/explanation/results.md
    """
    check_libraries("reproduce")
    from fairfleet.lab.cli import reproduce

    if name is None and (quick or seeds or rule or setting):
        raise UsageError(
            "name the table to reproduce; `fairfleet reproduce` without arguments lists them"
        )
    if page is not None and (name or as_json):
        raise UsageError(
            "--page writes all tables from their records and runs none; "
            "remove the table name and --json"
        )
    if page is not None:
        reproduce.write(page, results)
    elif name is None:
        reproduce.show_list(as_json)
    else:
        reproduce.reproduce(
            name, quick, seeds, rule or [], setting or [], results, data_dir, workers, as_json
        )


def check_libraries(command: str) -> None:
    """Raise UsageError if a library that the command always needs is not installed."""
    require(f"`fairfleet {command}`", "torch", "threadpoolctl", extras="lab,torch")
