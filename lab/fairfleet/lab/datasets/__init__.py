"""Real and generated data for the lab, each as one `Dataset`."""

from fairfleet.lab.datasets.base import BrokenDataset as BrokenDataset
from fairfleet.lab.datasets.base import Dataset as Dataset
from fairfleet.lab.datasets.base import MissingDataset as MissingDataset
from fairfleet.lab.datasets.registry import LOADERS as LOADERS
from fairfleet.lab.datasets.registry import load as load
