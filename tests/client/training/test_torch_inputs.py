"""TorchTask accepts data of every usual form and explains mistakes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from fairfleet.client.task import Job
from fairfleet.common.errors import BadRequest, TaskFailed, UsageError
from fairfleet.common.training_plan import Plan
from tests.support.samples.torch_tasks import X, Y, linear, same, task


class Pairs(Dataset[tuple[Any, Any]]):
    """A data set that returns single samples only, as one of images on disk would."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return X[index], int(Y[index])


class Endless(IterableDataset[Any]):
    """A data set without a length or an index."""

    def __iter__(self) -> Iterator[Any]:
        return iter([(X[0], Y[0])])


@pytest.mark.parametrize(
    "data",
    [
        (torch.from_numpy(X), torch.from_numpy(Y)),
        [X.astype(np.float64), Y.astype(np.uint8)],
        (np.asfortranarray(X)[::-1][::-1], Y.astype(np.int32)),
        TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)),
        Subset(
            TensorDataset(torch.from_numpy(np.vstack([X, X])), torch.from_numpy(np.hstack([Y, Y]))),
            range(33),
        ),
        Pairs(),
        [(torch.from_numpy(x), int(y)) for x, y in zip(X, Y, strict=True)],
    ],
    ids=[
        "tensors",
        "float64 and uint8",
        "reordered arrays",
        "TensorDataset",
        "Subset",
        "Dataset",
        "list of samples",
    ],
)
def test_data_of_every_form_give_the_same_result(data: Any) -> None:
    received = task().initial_model().named()
    job = Job(Plan(epochs=2, batch_size=8), want_gradient_norm=True)
    expected, result = task().train(received, job), task(train=data, test=data).train(received, job)
    assert same(expected.arrays, result.arrays)
    assert expected.report.gradient_norm == result.report.gradient_norm


def test_inputs_may_be_made_of_several_tensors() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 3)

        def forward(self, x: dict[str, Any]) -> Tensor:
            return self.linear(x["left"] + x["more"][0])  # type: ignore[no-any-return]

    samples = [({"left": x.astype(np.float64), "more": [x]}, y) for x, y in zip(X, Y, strict=True)]
    once = task(Sum, train=samples)
    assert once.train(once.initial_model().named(), Job(Plan(batch_size=17))).report.steps == 2


def test_a_model_that_works_in_place_does_not_change_the_data() -> None:
    x = torch.from_numpy(X.copy())
    once = task(lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(5, 3)), train=(x, Y))
    once.train(once.initial_model().named(), Job(Plan(epochs=2, batch_size=0)))
    assert np.array_equal(x, X)


def test_module_and_data_are_built_once_and_nothing_is_built_before_the_device_is_known() -> None:
    built = 0

    def counted() -> nn.Module:
        nonlocal built
        built += 1
        return linear()

    once = task(counted, device="auto")
    once.use_device("cpu")
    assert (built, once.device) == (0, "cpu")
    received = once.initial_model().named()
    for _ in range(3):
        once.train(received, Job(Plan()))
        once.evaluate(received)
    assert built == 1


def test_the_command_line_may_override_the_device_or_keep_it() -> None:
    chosen = task(device="cpu:0")
    chosen.use_device("auto")
    assert chosen.device == "cpu:0"
    chosen.use_device("cpu")
    assert chosen.device == "cpu"


@pytest.mark.parametrize("device", ["cuda:99", "mps:99", "abacus", "meta"])
def test_a_device_that_does_not_exist_is_refused(device: str) -> None:
    with pytest.raises(UsageError, match="give auto, cpu, cuda or mps"):
        task(device=device)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train": (X[:0], Y[:0])}, "training set is empty"),
        ({"train": []}, "training set is empty"),
        ({"train": (X, Y[:4])}, "found lengths 33, 4"),
        ({"test": (X, Y, Y)}, "the test set must be a pair"),
        ({"train": Endless()}, "the training set is a Endless"),
        ({"train": 7}, "the training set is a int"),
        ({"model": nn.Linear(5, 3)}, "a function that builds the model; found a Linear"),
    ],
)
def test_a_task_that_cannot_work_is_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        task(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": lambda: None}, "it returned NoneType"),
        ({"model": nn.ReLU}, "no trainable parameter"),
        (
            {"loss": lambda output, y: cross_entropy(output, y, reduction="none")},
            r"shape \[33\].*reduction='mean'",
        ),
        ({"train": [X[0].tolist()] * 4}, r"must be a pair \(x, y\)"),
        ({"train": [(X[0], "cat")] * 4}, r"must be a pair \(x, y\)"),
    ],
)
def test_mistakes_that_appear_in_training_are_explained(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        task(**options).train(linear_arrays(), Job(Plan()))


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        # A shape that torch would otherwise broadcast.
        ({"weight": np.zeros((3, 1), np.float32)}, r"weight has shape \(3, 1\)"),
        ({"more": np.zeros(1, np.float32)}, "more is not part of the model"),
    ],
)
def test_a_model_of_another_form_is_refused(odd: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        task().train({**linear_arrays(), **odd}, Job(Plan()))


def linear_arrays() -> dict[str, Any]:
    return task().initial_model().named()


@pytest.mark.parametrize("x", [X * np.nan, X * 1e30])
def test_a_loss_that_is_not_finite_fails_the_task(x: Any) -> None:
    with pytest.raises(TaskFailed, match="learning_rate"):
        task(train=(x, Y)).train(linear_arrays(), Job(Plan(steps=20, learning_rate=1e10)))


def test_read_only_arrays_are_accepted_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    received = task().initial_model()
    received.parameters.flags.writeable = False
    x = X.copy()
    x.flags.writeable = False
    once = task(train=(x, Y))
    once.train(received.named(), Job(Plan()))
    once.evaluate(received.named())
    assert [str(warning.message) for warning in recwarn] == []


class Folder(Pairs):
    """A data set that finds its samples anew whenever it is asked how many there are."""

    found = 10

    def __len__(self) -> int:
        return self.found


def test_a_data_set_that_shrinks_or_grows_in_place_is_seen_by_the_next_look() -> None:
    folder = Folder()
    once = task(train=lambda: folder, test=lambda: folder)
    for found in (4, 12):
        folder.found = found
        once.refresh()
        assert (once.train_samples, once.test_samples) == (found, found)
        assert once.train(linear_arrays(), Job(Plan())).report.samples == found
