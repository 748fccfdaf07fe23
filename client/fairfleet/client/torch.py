"""The usual task: a torch module, a training set, a test set and a loss.

The module and the data are built once, moved to the device once, and kept. Losses and the gradient
norm in a report are measured in eval mode over all training data (no dropout, batch normalisation by
its running statistics), so that they do not depend on batches; only the solver's steps run in train mode.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fairfleet.client.batches import batches, in_order
from fairfleet.client.samples import Data, Samples, samples
from fairfleet.client.task import Job, Trained
from fairfleet.common.errors import TaskFailed, UsageError
from fairfleet.common.plan import Plan
from fairfleet.common.reports import Evaluation, TrainReport
from fairfleet.common.tensors import Arrays, Model, Signature
