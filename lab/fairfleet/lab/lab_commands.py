"""`fairfleet simulate`, `compare` and `reproduce`: their flags. What they do is imported when they are called.

So `fairfleet --help` need not wait for torch, and where it is missing the command says so.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from fairfleet.common.errors import UsageError
from fairfleet.lab import options


def simulate_command(
    config: Annotated[Path | None, typer.Argument(help="YAML file with an experiment.", show_default=False)] = None,
    data: options.Data = None,
    partition: options.How = None,
    clients: options.Clients = None,
    per_round: options.PerRound = None,
    model: options.ModelName = None,
    rule: Annotated[str | None, typer.Option(help="name or name,parameter=value,…; see `fairfleet rules`.")] = None,
    rounds: options.Rounds = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of data, selection, batches and the first model.")] = None,
    set_: options.Settings = None,
    record: Annotated[
        Path | None, typer.Option(help="Add the run to this .jsonl; one that is there is not run.")
    ] = None,
    tensorboard: Annotated[Path | None, typer.Option(help="Write the curve as TensorBoard event files here.")] = None,
    data_dir: options.DataDir = None,
    workers: options.Workers = 0,
    as_json: options.AsJson = False,
) -> None:
    """Train a fleet of simulated clients in one process, with the server's own rules and the client's own training.

    Without anything said: the demo's ten clients. Fields of an experiment come from flags, then the YAML file.

    Examples:

      fairfleet simulate --rule fedlf

      fairfleet simulate --data fashion-mnist --partition dirichlet:0.1 --clients 100 --per-round 10 --model mlp:200,200

      fairfleet simulate --rule afl --set behaviour.dropout=0.2 --set plan.learning_rate=0.05 --json

      fairfleet simulate experiment.yaml --seed 3 --record runs.jsonl
    """
    check_torch("simulate")
    from fairfleet.lab.simulating import simulate

    flags = options.experiment_flags(data, partition, clients, per_round, model, rounds, set_)
    chosen = {name: value for name, value in {"rule": rule, "seed": seed}.items() if value is not None}
    simulate(config, flags | chosen, record, data_dir, workers, as_json, tensorboard)


def compare_command(
    config: Annotated[Path | None, typer.Argument(help="YAML file with a sweep.", show_default=False)] = None,
    rule: Annotated[list[str] | None, typer.Option(help="name or name,parameter=value,…; once for each rule.")] = None,
    codec: Annotated[list[str] | None, typer.Option(help="raw32, int8, topk:0.1, …; once for each codec.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="So many, from 0 on.")] = None,
    data: options.Data = None,
    partition: options.How = None,
    clients: options.Clients = None,
    per_round: options.PerRound = None,
    model: options.ModelName = None,
    rounds: options.Rounds = None,
    set_: options.Settings = None,
    output: Annotated[Path | None, typer.Option(help="Folder for records, tables, report and pictures.")] = None,
    data_dir: options.DataDir = None,
    workers: options.Workers = 0,
    pictures: Annotated[bool, typer.Option(help="Make the HTML report and the PNGs.")] = True,
    as_json: options.AsJson = False,
) -> None:
    """Run rules x seeds x settings x codecs and compare them: accuracy, fairness, conflicts.

    Runs that the output folder has already are not run again, so a comparison that was interrupted goes on where it
    was left. Accuracies are in percent; each measure is the mean over the seeds ± the standard deviation. With several
    codecs there is a second table: what each changes against raw32, seed by seed, ± the standard error.

    Examples:

      fairfleet compare

      fairfleet compare --rule fedavg --rule fedfv,alpha=0.1 --rule fedlf --seeds 5 --rounds 50

      fairfleet compare --data fashion-mnist --partition pat:2 --clients 100 --per-round 10 --model mlp:200,200

      fairfleet compare --rule fedlf --codec raw32 --codec int8 --codec topk:0.1 --seeds 5

      fairfleet compare sweep.yaml --output results/my-sweep
    """
    check_torch("compare")
    from fairfleet.lab.comparing import compare

    flags = options.experiment_flags(data, partition, clients, per_round, model, rounds, set_)
    given = {f"base.{path}": value for path, value in flags.items()}
    given |= {"rules": rule} if rule else {}
    given |= {"codecs": codec} if codec else {}
    given |= {"seeds": list(range(seeds))} if seeds else {}
    compare(config, given, output, data_dir, workers, pictures, as_json)


def reproduce_command(
    name: Annotated[
        str | None, typer.Argument(help="Which table, by name or letter; without it they are listed.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A short version that ends in about a minute.")] = False,
    seeds: Annotated[int | None, typer.Option(min=1, help="Run so many of the seeds; else two.")] = None,
    rule: Annotated[list[str] | None, typer.Option(help="Only these rules, by their names in the table.")] = None,
    setting: Annotated[list[str] | None, typer.Option(help="Only these settings, by their names in the table.")] = None,
    results: Annotated[Path, typer.Option(help="Folder of the records; runs that are there are not run.")] = (
        Path("results")
    ),
    page: Annotated[
        Path | None, typer.Option(help="Run nothing; write all that is in the records as a Markdown page.")
    ] = None,
    data_dir: options.DataDir = None,
    workers: options.Workers = 0,
    as_json: options.AsJson = False,
) -> None:
    """Run a published table again and print both, side by side.

    Long tables may be stopped and taken up again: every run that ended is kept in the folder of the records.

    Examples:

      fairfleet reproduce

      fairfleet reproduce fedfv-table3

      fairfleet reproduce A --quick

      fairfleet reproduce fedfv-table2 --seeds 3 --rule FedAvg --rule "FedFV τ=10"

      fairfleet reproduce --page docs/results.md
    """
    check_torch("reproduce")
    from fairfleet.lab import reproducing

    if name is None and (quick or seeds or rule or setting):
        raise UsageError("which table? `fairfleet reproduce` without anything lists them")
    if page is not None and (name or as_json):
        raise UsageError("--page writes all tables from their records and runs none: leave the name and --json out")
    if page is not None:
        reproducing.write(page, results)
    elif name is None:
        reproducing.show_list(as_json)
    else:
        reproducing.reproduce(name, quick, seeds, rule or [], setting or [], results, data_dir, workers, as_json)


def check_torch(command: str) -> None:
    if importlib.util.find_spec("torch") is None:
        raise UsageError(
            f"`fairfleet {command}` needs torch, which is not installed: pip install 'fairfleet[lab,torch]'"
        )
