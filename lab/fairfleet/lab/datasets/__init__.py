"""Real and generated data for the lab, each loaded as one `Dataset`."""

from fairfleet.lab.datasets.base import BrokenDataset, Dataset, MissingDataset
from fairfleet.lab.datasets.registry import LOADERS, load

__all__ = ["LOADERS", "BrokenDataset", "Dataset", "MissingDataset", "load"]
