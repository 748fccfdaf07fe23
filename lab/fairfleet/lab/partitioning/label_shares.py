"""The labels that each client holds: counts, a summary, and a picture.

matplotlib is imported only when a picture is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fairfleet.common.errors import UsageError
from fairfleet.common.extras import require
from fairfleet.lab.partitioning.partitions import Indices

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_BARS = 300  # Clients; more are drawn as an image.
MAX_COLOURS = 20  # Classes; more are drawn as an image.
FORMATS = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class LabelShares:
    """The number of samples of each class that each client holds."""

    counts: NDArray[np.int64]  # One row per client, one column per class.
    class_names: tuple[str, ...]

    @classmethod
    def of(
        cls, labels: Indices, shares: Sequence[Indices], classes: int, names: tuple[str, ...]
    ) -> LabelShares:
        """Count the labels of each client's share; without names, classes are named by number."""
        counts = np.stack([np.bincount(labels[share], minlength=classes) for share in shares])
        return cls(counts, names or tuple(str(label) for label in range(classes)))

    @property
    def sizes(self) -> NDArray[np.int64]:
        """The number of samples of each client."""
        return np.asarray(self.counts.sum(1))

    @property
    def classes_held(self) -> NDArray[np.int64]:
        """The number of classes of which each client has a sample."""
        return np.asarray(np.count_nonzero(self.counts, axis=1))

    @property
    def skew(self) -> float:
        """The mean total variation distance between the labels of a client and of all clients.

        It is 0 if all clients have the same mix of labels, and at most nearly 1.
        """
        client_mix = self.counts / self.sizes[:, None]
        overall_mix = self.counts.sum(0) / self.counts.sum()
        return float(np.abs(client_mix - overall_mix).sum(1).mean() / 2)

    def as_json(self) -> dict[str, Any]:
        """Return the counts and their summary as plain JSON values."""
        return {
            "clients": len(self.counts),
            "samples": int(self.counts.sum()),
            "skew": round(self.skew, 6),
            "class_names": list(self.class_names),
            "sizes": self.sizes.tolist(),
            "counts": self.counts.tolist(),
        }


def picture(shares: LabelShares, title: str, path: Path) -> None:
    """Draw a column for each client with a colour for each class, and save it to `path`.

    Very many clients or classes become an image instead. Raises UsageError for an unknown file
    ending, without matplotlib, or if the file cannot be written.
    """
    if path.suffix not in FORMATS:
        raise UsageError(
            f"a picture is saved as {', '.join(FORMATS)}; {path} has none of these endings"
        )
    require("a picture", "matplotlib")
    import matplotlib as mpl
    from matplotlib.figure import Figure  # pyplot would need a display and global state.

    # Class names come from users and may contain a $, which is no formula.
    with mpl.rc_context({"text.parse_math": False}):
        figure = Figure(figsize=(10, 5), layout="constrained")
        _draw(figure.add_subplot(), shares, title)
        try:
            figure.savefig(path, dpi=150)
        except OSError as error:
            raise UsageError(f"cannot write the picture {path}: {error.strerror}") from error


def _draw(axes: Axes, shares: LabelShares, title: str) -> None:
    clients, classes = shares.counts.shape
    if clients <= MAX_BARS and classes <= MAX_COLOURS:
        _draw_bars(axes, shares)
    else:
        _draw_image(axes, shares)
    axes.set_title(title, loc="left")
    axes.set_xlabel("client")
    axes.locator_params(axis="x", integer=True)  # Client numbers are integers.


def _draw_bars(axes: Axes, shares: LabelShares) -> None:
    from matplotlib import colormaps

    clients, classes = shares.counts.shape
    colours = colormaps["tab10" if classes <= 10 else "tab20"]
    bottom = np.zeros(clients)
    for label, name in enumerate(shares.class_names):
        axes.bar(
            np.arange(clients),
            shares.counts[:, label],
            bottom=bottom,
            width=0.9,
            color=colours(label),
            label=name,
        )
        bottom += shares.counts[:, label]
    axes.set_ylabel("samples")
    axes.margins(x=0.01)
    axes.set_ylim(0, 1.05 * bottom.max())
    axes.legend(
        title="label", loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, reverse=True
    )


def _draw_image(axes: Axes, shares: LabelShares) -> None:
    client_mix = shares.counts / shares.sizes[:, None]
    image = axes.imshow(
        client_mix.T, aspect="auto", interpolation="nearest", cmap="viridis", vmin=0.0
    )
    axes.set_ylabel("label")
    axes.figure.colorbar(image, ax=axes, label="share of the client's samples")
