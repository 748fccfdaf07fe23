"""Which labels each client holds: counted, summarised, and drawn as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fairfleet.common.errors import UsageError
from fairfleet.lab.partitions import Indices

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_BARS = 300  # clients; more are drawn as rows of an image
MOST_COLOURS = 20  # classes likewise
FORMATS = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class LabelShares:
    counts: NDArray[np.int64]  # one row per client, one column per class
    class_names: tuple[str, ...]

    @classmethod
    def of(cls, labels: Indices, shares: Sequence[Indices], classes: int, names: tuple[str, ...]) -> LabelShares:
        counts = np.stack([np.bincount(labels[share], minlength=classes) for share in shares])
        return cls(counts, names or tuple(str(label) for label in range(classes)))

    @property
    def sizes(self) -> NDArray[np.int64]:
        return np.asarray(self.counts.sum(1))

    @property
    def classes_held(self) -> NDArray[np.int64]:
        """Of each client: how many classes it has a sample of."""
        return np.asarray(np.count_nonzero(self.counts, axis=1))

    @property
    def skew(self) -> float:
        """0 if all clients have the mix of the whole, up to nearly 1: the mean of their total variation distances."""
        own = self.counts / self.sizes[:, None]
        whole = self.counts.sum(0) / self.counts.sum()
        return float(np.abs(own - whole).sum(1).mean() / 2)

    def as_json(self) -> dict[str, Any]:
        return {
            "clients": len(self.counts),
            "samples": int(self.counts.sum()),
            "skew": round(self.skew, 6),
            "class_names": list(self.class_names),
            "sizes": self.sizes.tolist(),
            "counts": self.counts.tolist(),
        }


def picture(shares: LabelShares, title: str, path: Path) -> None:
    """A column for each client, a colour for each class; very many of either become an image."""
    if path.suffix not in FORMATS:
        raise UsageError(f"a picture is saved as {', '.join(FORMATS)}; {path} has none of these endings")
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure  # not pyplot: no display, and nothing global
    except ModuleNotFoundError as error:
        raise UsageError("pictures need matplotlib: pip install 'fairfleet[plots]'") from error
    with mpl.rc_context({"text.parse_math": False}):  # names are people's own, and may have a $ in them
        figure = Figure(figsize=(10, 5), layout="constrained")
        axes = figure.add_subplot()
        clients, classes = shares.counts.shape
        (_bars if clients <= MOST_BARS and classes <= MOST_COLOURS else _image)(axes, shares)
        axes.set_title(title, loc="left")
        axes.set_xlabel("client")
        axes.locator_params(axis="x", integer=True)  # there is no client 0.5
        try:
            figure.savefig(path, dpi=150)
        except OSError as error:
            raise UsageError(f"cannot write the picture {path}: {error.strerror}") from error


def _bars(axes: Axes, shares: LabelShares) -> None:
    from matplotlib import colormaps

    clients, classes = shares.counts.shape
    colours = colormaps["tab10" if classes <= 10 else "tab20"]
    bottom = np.zeros(clients)
    for label, name in enumerate(shares.class_names):
        axes.bar(
            np.arange(clients), shares.counts[:, label], bottom=bottom, width=0.9, color=colours(label), label=name
        )
        bottom += shares.counts[:, label]
    axes.set_ylabel("samples")
    axes.margins(x=0.01)
    axes.set_ylim(0, 1.05 * bottom.max())
    axes.legend(title="label", loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, reverse=True)


def _image(axes: Axes, shares: LabelShares) -> None:
    own = shares.counts / shares.sizes[:, None]
    drawn = axes.imshow(own.T, aspect="auto", interpolation="nearest", cmap="viridis", vmin=0.0)
    axes.set_ylabel("label")
    axes.figure.colorbar(drawn, ax=axes, label="share of the client's samples")
