"""Write event files for TensorBoard.

This needs the extra `tensorboard`, which is small. It is imported only when a writer is created.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fairfleet.common.errors import UsageError
from fairfleet.common.extras import require


class EventFiles:
    """A folder of event files, which TensorBoard shows as one run.

    Raises UsageError if tensorboardX is not installed or the folder is not writable.
    """

    def __init__(self, folder: Path) -> None:
        require("the option --tensorboard", "tensorboardX")
        from tensorboardX import SummaryWriter

        try:
            self._writer: Any = SummaryWriter(str(folder))
        except OSError as error:
            raise UsageError(
                f"cannot write to {folder}: {error.strerror}. Give another folder."
            ) from error

    def scalars(
        self, step: int, values: Mapping[str, float | None], unix_seconds: float | None = None
    ) -> None:
        """Write one value per name for a step. Missing and non-finite values are left out."""
        for name, value in values.items():
            if value is not None and math.isfinite(value):
                self._writer.add_scalar(name, value, step, unix_seconds)

    def distribution(
        self, step: int, name: str, values: list[float], unix_seconds: float | None = None
    ) -> None:
        """Write the distribution of values for a step, as a histogram."""
        self._writer.add_histogram(name, np.asarray(values), step, walltime=unix_seconds)

    def flush(self) -> None:
        """Write buffered events to the disk."""
        self._writer.flush()

    def close(self) -> None:
        """Write buffered events and close the file."""
        self._writer.close()
