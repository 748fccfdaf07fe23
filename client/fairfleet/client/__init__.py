"""The FairFleet client: a process that trains on local data and sends updates to a server.

Users write a task and give it to `fairfleet client --task module:name`. The names below are
the public API. They are loaded on first use, so `import fairfleet.client` stays cheap: it
loads neither torch nor gRPC.

- `Task`, `Measuring`, `Refreshing`, `Keeping`: the interfaces that a task implements.
- `Job`, `Trained`: what `Task.train` receives and returns.
- `Evaluation`, `TrainReport`: the figures that `Task.evaluate` and `Task.train` report.
- `higher`, `lower`: make a measure of `Evaluation.measures`, such as AUC or MAE.
- `Abandoned`: raised out of `Job.progress` when the result is no longer needed.
- `TorchTask`: a ready-made task for a torch module. It needs torch.
- `LayerSimilarity`: FedCKA's regularisation, for `TorchTask`.
- `SoftmaxTask`: a ready-made task in numpy, for small boards.
- `load_task`: builds the task that `--task module:name` refers to.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fairfleet.client.softmax import SoftmaxTask
    from fairfleet.client.task import (
        Abandoned,
        Job,
        Keeping,
        Measuring,
        Refreshing,
        Task,
        Trained,
        load_task,
    )
    from fairfleet.client.torch import TorchTask
    from fairfleet.client.training.layer_similarity import LayerSimilarity
    from fairfleet.common.reports import Evaluation, TrainReport, higher, lower

__all__ = [
    "Abandoned",
    "Evaluation",
    "Job",
    "Keeping",
    "LayerSimilarity",
    "Measuring",
    "Refreshing",
    "SoftmaxTask",
    "Task",
    "TorchTask",
    "TrainReport",
    "Trained",
    "higher",
    "load_task",
    "lower",
]

_REPORTS = "fairfleet.common.reports"
_MODULES = {  # the others are in `task`
    "LayerSimilarity": "fairfleet.client.training.layer_similarity",
    "SoftmaxTask": "fairfleet.client.softmax",
    "TorchTask": "fairfleet.client.torch",
    **dict.fromkeys(("Evaluation", "TrainReport", "higher", "lower"), _REPORTS),
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(_MODULES.get(name, f"{__name__}.task"))
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
