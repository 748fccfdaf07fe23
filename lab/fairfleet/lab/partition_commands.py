"""`fairfleet partition`: shows who would hold which labels, as a table and as a picture."""

from __future__ import annotations

import enum
import json
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fairfleet.lab.datasets import Dataset, load
from fairfleet.lab.datasets.places import VARIABLE
from fairfleet.lab.label_shares import LabelShares, picture
from fairfleet.lab.partitions import Partition, partition

ROWS = 20  # clients that are shown one by one
BAR = 50  # characters for the largest client
COLOURS = ("blue", "dark_orange", "green", "red", "medium_purple", "orange4", "hot_pink", "grey50", "yellow3", "cyan")


class Part(enum.StrEnum):
    """As in an experiment, whose default is `all` too: what is shown is what is run."""

    ALL = "all"
    TRAIN = "train"


SHARED = {Part.ALL: "all samples", Part.TRAIN: "training part"}


def partition_command(
    dataset: Annotated[str, typer.Argument(help="name or name,option=value,…, or the path of your own data.")],
    how: Annotated[
        str, typer.Argument(metavar="PARTITION", help="iid, shards:2, pat:2, pat-fixed:2, dirichlet:0.1, …")
    ],
    clients: Annotated[int | None, typer.Option(min=1, help="How many; natural users may be all of them.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Another seed, another draw.")] = 0,
    part: Annotated[
        Part, typer.Option(help="Share out all samples, as simulate does, or the published training part only.")
    ] = Part.ALL,
    data_dir: Annotated[
        Path | None, typer.Option(help=f"Where the datasets are, before the folders of {VARIABLE}.")
    ] = None,
    save: Annotated[Path | None, typer.Option("--picture", help="Save it as .png, .svg or .pdf.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs: one JSON object, with all counts.")] = False,
) -> None:
    """Share a dataset out among clients, and see which labels each of them holds, for training and testing together.

    These are the clients of `simulate` and `compare` with the same data, partition, clients and seed: all samples are
    shared out, those of a published test part too, unless there `--set part=train` and here `--part train` is given.

    Partitions: iid; shards:N, of sorted labels; pat:K, K classes each; pat-fixed:K, FedLF's groups; dirichlet:B, by
    class; dirichlet-capped:B, FedLF's; quantity:B, of sizes; class, one each; user, the natural clients. Where sizes
    are left to chance, a minimum may be asked for, as in dirichlet:0.1,minimum=20.

    Examples:

      fairfleet partition digits dirichlet:0.3 --clients 10

      fairfleet partition cifar10 shards:2 --clients 100 --picture cifar10.png

      fairfleet partition synthetic,alpha=0.5 user --json
    """
    spec = Partition.parse(how)
    with Console(stderr=True).status(f"Reading {escape(dataset)}"):  # some archives take many seconds the first time
        data = load(dataset, data_dir)
    shared = data if part is Part.ALL else data.training_part()
    shares = LabelShares.of(
        shared.y, partition(spec, shared.y, shared.user, clients, seed), data.classes, data.class_names
    )
    title = f"{data.name}, {SHARED[part]}, {spec}, {len(shares.counts)} clients, seed {seed}"
    if save:
        picture(shares, title, save)
    if as_json:
        print(
            json.dumps({"dataset": data.name, "partition": str(spec), "seed": seed, "part": part, **shares.as_json()})
        )
    else:
        Console(highlight=False).print(Padding(Group(*_told(shares, title, shared, save)), (1, 2)))


def _told(shares: LabelShares, title: str, shared: Dataset, save: Path | None) -> list[RenderableType]:
    sizes, held = shares.sizes, shares.classes_held
    left = len(shared) - int(sizes.sum())
    facts = Table.grid(padding=(0, 2, 0, 0))
    facts.add_row("samples", f"{sizes.sum():,} of {len(shared):,}" + (f", {left:,} with nobody" if left else ""))
    facts.add_row("per client", _range(sizes))
    facts.add_row("classes per client", f"{_range(held)} of {len(shares.class_names)}")
    facts.add_row("label skew", f"{shares.skew:.3f} (0: every client has the mix of the whole)")
    if save:
        facts.add_row("picture", Text(str(save)))
    return [Text(title, "bold"), "", _bars(shares), "", facts]


def _range(values: np.ndarray) -> str:
    return f"{values.min():,} to {values.max():,}, median {np.median(values):,.0f}"


def _bars(shares: LabelShares) -> RenderableType:
    """A bar for each client, as long as it has samples, in the colours of its labels."""
    table = Table.grid(padding=(0, 2, 0, 0))
    scale = BAR / shares.sizes.max()
    for client, counts in enumerate(shares.counts[:ROWS]):
        ends = np.rint(np.cumsum(counts) * scale).astype(int)
        bar = Text.assemble(
            *(("█" * width, COLOURS[label % len(COLOURS)]) for label, width in enumerate(np.diff(ends, prepend=0)))
        )
        table.add_row(str(client), bar, f"{counts.sum():,}")
    if len(shares.counts) > ROWS:
        table.add_row("…", f"{len(shares.counts) - ROWS} more", "")
    return table
