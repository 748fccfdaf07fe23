"""Durable files of a state directory: models, the history's rows, and checksummed arrays."""

from fairfleet.server.storage.files.history_files import DurableHistory
from fairfleet.server.storage.files.tensor_files import TensorFiles

__all__ = ["DurableHistory", "TensorFiles"]
