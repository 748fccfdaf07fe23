"""`fairfleet partition`: show which labels each client would have, as bars and as a picture."""

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
from fairfleet.lab.partitioning.label_shares import LabelShares, picture
from fairfleet.lab.partitioning.partitions import Partition, partition

ROWS = 20  # clients that are shown individually
BAR_WIDTH = 50  # characters for the largest client
COLOURS = (
    "blue",
    "dark_orange",
    "green",
    "red",
    "medium_purple",
    "orange4",
    "hot_pink",
    "grey50",
    "yellow3",
    "cyan",
)


class DatasetPart(enum.StrEnum):
    """The part of the dataset to divide, with the names and the default that experiments use."""

    ALL = "all"
    TRAIN = "train"


PART_NAMES = {DatasetPart.ALL: "all samples", DatasetPart.TRAIN: "training part"}


def partition_command(
    dataset: Annotated[
        str, typer.Argument(help="Dataset: name, name,option=value,… or the path of your own data.")
    ],
    how: Annotated[
        str,
        typer.Argument(
            metavar="PARTITION",
            help="Partition: iid, shards:2, pat:2, pat-fixed:2, dirichlet:0.1, …",
        ),
    ],
    clients: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of clients.",
            show_default="from the data, for user and class; otherwise required",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random division.")] = 0,
    part: Annotated[
        DatasetPart,
        typer.Option(
            help="Divide all samples, as simulate does, or the published training part only."
        ),
    ] = DatasetPart.ALL,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            help=f"Folder of the datasets, searched before the folders of {VARIABLE}.",
            show_default="none",
        ),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(
            "--picture", help="Save a picture as .png, .svg or .pdf.", show_default="none"
        ),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print one JSON object with all counts, for programs.",
            show_default="off",
        ),
    ] = False,
) -> None:
    """Divide a dataset among clients and show their labels.

    The counts are of training and test samples together. `simulate` and `compare` use the same
    clients for the same data, partition, number of clients and seed. All samples are divided,
    including a published test part; use `--part train` here and `--set part=train` there to divide
    the training part only.

    Partitions: iid; shards:N, of sorted labels; pat:K, K classes each; pat-fixed:K, FedLF's
    groups; dirichlet:B, by class; dirichlet-capped:B, FedLF's; quantity:B, of sizes; class, one
    each; user, the natural clients. If sizes are random, a minimum can be set, as in
    dirichlet:0.1,minimum=20.

    Examples:

      fairfleet partition digits dirichlet:0.3 --clients 10

      fairfleet partition cifar10 shards:2 --clients 100 --picture cifar10.png

      fairfleet partition synthetic,alpha=0.5 user --json
    """
    spec = Partition.parse(how)
    with Console(stderr=True).status(f"Reading {escape(dataset)}"):
        data = load(dataset, data_dir)  # Some archives take many seconds the first time.
    divided = data if part is DatasetPart.ALL else data.training_part()
    parts = partition(spec, divided.y, divided.user, clients, seed)
    shares = LabelShares.of(divided.y, parts, data.classes, data.class_names)
    title = f"{data.name}, {PART_NAMES[part]}, {spec}, {len(shares.counts)} clients, seed {seed}"
    if save:
        picture(shares, title, save)
    if as_json:
        names = {"dataset": data.name, "partition": str(spec), "seed": seed, "part": part}
        print(json.dumps({**names, **shares.as_json()}))
    else:
        summary = Group(*_summary(shares, title, divided, save))
        Console(highlight=False).print(Padding(summary, (1, 2)))


def _summary(
    shares: LabelShares, title: str, divided: Dataset, save: Path | None
) -> list[RenderableType]:
    sizes = shares.sizes
    unused = len(divided) - int(sizes.sum())
    samples = f"{sizes.sum():,} of {len(divided):,}" + (f", {unused:,} unused" if unused else "")
    classes = f"{_range(shares.classes_held)} of {len(shares.class_names)}"
    facts = Table.grid(padding=(0, 2, 0, 0))
    facts.add_row("samples", samples)
    facts.add_row("per client", _range(sizes))
    facts.add_row("classes per client", classes)
    facts.add_row("label skew", f"{shares.skew:.3f} (0: every client has the overall label mix)")
    if save:
        facts.add_row("picture", Text(str(save)))
    return [Text(title, "bold"), "", _bars(shares), "", facts]


def _range(values: np.ndarray) -> str:
    return f"{values.min():,} to {values.max():,}, median {np.median(values):,.0f}"


def _bars(shares: LabelShares) -> RenderableType:
    """Return one bar per client; its length shows the samples, its colours the labels."""
    table = Table.grid(padding=(0, 2, 0, 0))
    scale = BAR_WIDTH / shares.sizes.max()
    for client, counts in enumerate(shares.counts[:ROWS]):
        table.add_row(str(client), _bar(counts, scale), f"{counts.sum():,}")
    if len(shares.counts) > ROWS:
        table.add_row("…", f"{len(shares.counts) - ROWS} more", "")
    return table


def _bar(counts: np.ndarray, scale: float) -> Text:
    ends = np.rint(np.cumsum(counts) * scale).astype(int)
    widths = np.diff(ends, prepend=0)
    return Text.assemble(
        *(("█" * width, COLOURS[label % len(COLOURS)]) for label, width in enumerate(widths))
    )
