"""The division of a dataset among clients, and of each client's samples into train and test."""

from fairfleet.lab.partitioning.label_shares import LabelShares
from fairfleet.lab.partitioning.partitions import Indices, Partition, partition
from fairfleet.lab.partitioning.splits import Split, split, split_all, split_as_published

__all__ = [
    "Indices",
    "LabelShares",
    "Partition",
    "Split",
    "partition",
    "split",
    "split_all",
    "split_as_published",
]
