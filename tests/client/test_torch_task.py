from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from fairfleet.client.task import Abandoned, Job, Task
from fairfleet.client.torch import TorchTask
from fairfleet.common.errors import BadRequest, TaskFailed, UsageError
from fairfleet.common.plan import Plan
from fairfleet.common.tensors import Arrays, Section

torch.set_num_threads(1)  # on a busy machine the threads of small models wait for each other for seconds

random = np.random.default_rng(2)
X = random.normal(size=(33, 5)).astype(np.float32)
Y = random.integers(0, 3, 33)


class Pairs(Dataset[tuple[Any, Any]]):
    """A data set that only gives samples one by one, as one of images on disk would."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return X[index], int(Y[index])


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([(X[0], Y[0])])


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))


def linear() -> nn.Module:
    return nn.Linear(5, 3)


def task(model: Any = linear, **options: Any) -> TorchTask:
    usual: dict[str, Any] = {"train": (X, Y), "test": (X[:9], Y[:9]), "loss": cross_entropy, "device": "cpu"}
    return TorchTask(model, **{**usual, **options})


def same(one: Arrays, other: Arrays) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def moved(before: Arrays, after: Arrays) -> set[str]:
    return {name for name in before if not np.array_equal(before[name], after[name])}


def test_it_is_a_task() -> None:
    assert isinstance(task(), Task)
    assert (task().train_samples, task().test_samples, task().device) == (33, 9, "cpu")


def test_the_same_plan_and_model_give_the_same_result_to_the_bit() -> None:
    """Dropout and batch order included, whatever was trained or drawn in between."""
    once = task(normalised)
    received = once.initial_model().named()
    job = Job(Plan(epochs=2, batch_size=8, momentum=0.9, seed=5))
    first = once.train(received, job)
    once.train(received, Job(Plan(epochs=3, seed=6)))
    torch.rand(7)  # others draw as well
    again = once.train(received, job)
    assert same(first.arrays, again.arrays)
    assert first.report.loss_after == again.report.loss_after
    other = once.train(received, Job(Plan(epochs=2, batch_size=8, momentum=0.9, seed=7)))
    assert not same(first.arrays, other.arrays)


def test_training_leaves_the_random_state_of_others_alone() -> None:
    once = task(normalised)
    received = once.initial_model().named()
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    once.train(received, Job(Plan()))
    assert torch.equal(torch.rand(3), expected)


def test_a_trained_model_is_not_changed_by_the_next_training() -> None:
    once = task()
    received = once.initial_model()
    before = received.parameters.copy()
    trained = once.train(received.named(), Job(Plan())).arrays
    kept = {name: array.copy() for name, array in trained.items()}
    once.train(received.named(), Job(Plan(epochs=5)))
    assert same(trained, kept)
    assert np.array_equal(received.parameters, before)


def test_the_initial_model_is_one_before_any_training() -> None:
    def ones() -> nn.Module:
        module = nn.Linear(5, 3)
        nn.init.ones_(module.weight)
        return module

    once = task(ones)
    once.train(once.initial_model().named(), Job(Plan()))
    assert (once.initial_model().named()["weight"] == 1).all()


def test_batch_norm_statistics_and_counters_are_part_of_the_model() -> None:
    once = task(normalised)
    received = once.initial_model()
    sections = {tensor.name: tensor.section for tensor in received.signature.tensors}
    assert sections["1.weight"] is Section.PARAMETERS
    assert sections["1.running_mean"] is sections["1.running_var"] is Section.BUFFERS
    assert sections["1.num_batches_tracked"] is Section.COUNTERS
    received.named()["1.num_batches_tracked"][...] = 40
    trained = once.train(received.named(), Job(Plan(steps=7, batch_size=8)))
    assert moved(received.named(), trained.arrays) | {"0.bias"} == set(sections)  # the mean takes that bias out again
    assert trained.arrays["1.num_batches_tracked"] == 47  # what was received counts, not what this process did


def test_measuring_leaves_batch_norm_statistics_alone() -> None:
    once = task(normalised)
    received = once.initial_model().named()
    trained = once.train(received, Job(Plan(steps=1, batch_size=8), want_gradient_norm=True))
    assert trained.arrays["1.num_batches_tracked"] == 1


@pytest.mark.parametrize("samples", [17, 33])
def test_a_last_batch_of_one_sample_does_not_break_batch_norm(samples: int) -> None:
    once = task(normalised, train=(X[:samples], Y[:samples]))
    report = once.train(once.initial_model().named(), Job(Plan(epochs=2, batch_size=16))).report
    assert report.steps == 2 * (samples // 16)


def test_batches_of_one_that_cannot_be_helped_are_told_clearly() -> None:
    once = task(normalised, train=(X[:1], Y[:1]))
    with pytest.raises(TaskFailed, match=r"one sample.*batch_size"):
        once.train(once.initial_model().named(), Job(Plan()))
    assert task(train=(X[:1], Y[:1])).train(task().initial_model().named(), Job(Plan())).report.steps == 1


def test_buffers_that_are_not_saved_and_second_names_of_a_tensor_are_no_part_of_the_model() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.out = nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)
            self.out.weight = self.into.weight
            self.register_buffer("scratch", torch.zeros(2), persistent=False)
            self.register_buffer("scale", torch.ones(5))

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.into(x)) * self.scale  # type: ignore[no-any-return]

    once = task(Tied, loss=cross_entropy)
    received = once.initial_model()
    assert set(received.named()) == {"into.weight", "scale"}
    received.named()["scale"][...] = 0.0
    trained = once.train(received.named(), Job(Plan(steps=2, proximal_mu=0.1)))
    assert moved(received.named(), trained.arrays) == set()  # the scale that came kills every gradient
    received.named()["scale"][...] = 1.0
    assert moved(received.named(), once.train(received.named(), Job(Plan(steps=2))).arrays) == {"into.weight"}
    module = once._module
    assert isinstance(module, Tied)
    assert module.out.weight is module.into.weight


def test_frozen_parameters_stay_and_are_neither_decayed_nor_pulled() -> None:
    def frozen() -> nn.Module:
        module = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
        module[0].requires_grad_(False)
        return module

    once = task(frozen)
    received = once.initial_model().named()
    trained = once.train(received, Job(Plan(proximal_mu=1.0, weight_decay=0.1), want_gradient_norm=True))
    assert moved(received, trained.arrays) == {"1.weight", "1.bias"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_models_of_every_float_type_train_and_keep_their_type(dtype: torch.dtype) -> None:
    once = task(lambda: normalised().to(dtype))
    received = once.initial_model()
    types = {tensor.name: tensor.dtype for tensor in received.signature.tensors}
    assert types["0.weight"] == types["1.running_mean"] == str(dtype).removeprefix("torch.")
    assert types["1.num_batches_tracked"] == "int64"
    trained = once.train(received.named(), Job(Plan(epochs=5, batch_size=8), want_gradient_norm=True))
    assert trained.report.loss_after < trained.report.loss_before
    assert {str(array.dtype) for array in trained.arrays.values()} == {"float32", "int64"}
    assert once.evaluate(trained.arrays).accuracy is not None


@pytest.mark.parametrize(
    "data",
    [
        (torch.from_numpy(X), torch.from_numpy(Y)),
        [X.astype(np.float64), Y.astype(np.uint8)],
        (np.asfortranarray(X)[::-1][::-1], Y.astype(np.int32)),
        TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)),
        Subset(TensorDataset(torch.from_numpy(np.vstack([X, X])), torch.from_numpy(np.hstack([Y, Y]))), range(33)),
        Pairs(),
        [(torch.from_numpy(x), int(y)) for x, y in zip(X, Y, strict=True)],
    ],
    ids=["tensors", "float64 and uint8", "turned arrays", "TensorDataset", "Subset", "Dataset", "list of samples"],
)
def test_data_of_every_form_mean_the_same(data: Any) -> None:
    received = task().initial_model().named()
    job = Job(Plan(epochs=2, batch_size=8), want_gradient_norm=True)
    one, other = task().train(received, job), task(train=data, test=data).train(received, job)
    assert same(one.arrays, other.arrays)
    assert one.report.gradient_norm == other.report.gradient_norm


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


def test_the_losses_are_over_all_data_in_eval_mode_and_the_gradient_is_theirs() -> None:
    once = task(normalised)
    received = once.initial_model()
    module = normalised()
    module.load_state_dict({name: torch.tensor(array) for name, array in received.named().items()})
    module.eval()
    loss = cross_entropy(module(torch.from_numpy(X)), torch.from_numpy(Y))
    loss.backward()  # type: ignore[no-untyped-call]
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in module.parameters() if p.grad is not None))
    trained = once.train(received.named(), Job(Plan(batch_size=8), want_gradient_norm=True))
    assert trained.report.loss_before == pytest.approx(loss.item(), rel=1e-5)
    assert trained.report.gradient_norm == pytest.approx(norm, rel=1e-5)
    module.load_state_dict({name: torch.tensor(array) for name, array in trained.arrays.items()})
    after = cross_entropy(module.eval()(torch.from_numpy(X)), torch.from_numpy(Y)).item()
    assert trained.report.loss_after == pytest.approx(after, rel=1e-5)


def test_measuring_in_several_batches_gives_what_one_would(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(Plan(), want_gradient_norm=True)
    received = task().initial_model().named()
    whole, evaluated = task().train(received, job).report, task().evaluate(received)
    monkeypatch.setattr("fairfleet.client.torch.MEASURE_BATCH", 7)
    parts, evaluated_in_parts = task().train(received, job).report, task().evaluate(received)
    assert parts.loss_before == pytest.approx(whole.loss_before, rel=1e-6)
    assert parts.gradient_norm == pytest.approx(whole.gradient_norm, rel=1e-5)
    assert evaluated_in_parts.accuracy == pytest.approx(evaluated.accuracy)
    assert evaluated_in_parts.loss == pytest.approx(evaluated.loss, rel=1e-6)


def test_the_gradient_norm_is_reported_only_when_asked_for() -> None:
    assert task().train(task().initial_model().named(), Job(Plan())).report.gradient_norm is None


def test_progress_is_told_after_each_step_and_may_end_the_training() -> None:
    told: list[tuple[int, int]] = []

    def progress(done: int, planned: int, loss: float) -> None:
        assert math.isfinite(loss)
        told.append((done, planned))
        if done == 2:
            raise Abandoned

    once = task()
    received = once.initial_model().named()
    with pytest.raises(Abandoned):
        once.train(received, Job(Plan(epochs=1, batch_size=11), progress=progress))
    assert told == [(1, 3), (2, 3)]
    assert once.train(received, Job(Plan(epochs=1, batch_size=11))).report.steps == 3  # and can train again


def test_accuracy_is_known_for_class_logits_only() -> None:
    target = random.normal(size=(33, 3))
    regression = task(train=(X, target), test=(X, target), loss=mse_loss)
    found = regression.evaluate(regression.initial_model().named())
    assert (found.accuracy, found.samples) == (None, 33)
    assert found.loss > 0


def test_accuracy_may_be_ones_own() -> None:
    def close(output: Tensor, target: Tensor) -> Tensor:
        return ((output - target).abs() < 1e9).float().mean()

    target = random.normal(size=(33, 3))
    regression = task(train=(X, target), test=(X, target), loss=mse_loss, accuracy=close)
    assert regression.evaluate(regression.initial_model().named()).accuracy == 1.0


def test_accuracy_is_the_share_of_right_answers() -> None:
    received = task().initial_model()
    found = task().evaluate(received.named())
    said = (X[:9] @ received.named()["weight"].T + received.named()["bias"]).argmax(1)
    assert found.accuracy == pytest.approx(np.mean(said == Y[:9]))


def test_without_test_samples_there_is_nothing_to_evaluate() -> None:
    for bare in (task(test=None), task(test=(X[:0], Y[:0]))):
        assert bare.test_samples == 0
        with pytest.raises(UsageError, match="test="):
            bare.evaluate(bare.initial_model().named())


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


def test_who_starts_the_client_may_choose_another_device_or_leave_it() -> None:
    chosen = task(device="cpu:0")
    chosen.use_device("auto")
    assert chosen.device == "cpu:0"
    chosen.use_device("cpu")
    assert chosen.device == "cpu"


@pytest.mark.parametrize("device", ["cuda:99", "mps:99", "abacus", "meta"])
def test_a_device_that_is_not_there_is_refused(device: str) -> None:
    with pytest.raises(UsageError, match="give auto, cpu, cuda or mps"):
        task(device=device)


@pytest.mark.parametrize(
    ("options", "found"),
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
def test_a_task_that_cannot_work_is_refused_at_once(options: dict[str, Any], found: str) -> None:
    with pytest.raises(UsageError, match=found):
        task(**options)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"model": lambda: None}, "it returned NoneType"),
        ({"model": nn.ReLU}, "no trainable parameter"),
        ({"loss": lambda output, y: cross_entropy(output, y, reduction="none")}, r"shape \[33\].*reduction='mean'"),
        ({"train": [X[0].tolist()] * 4}, r"must be a pair \(x, y\)"),
        ({"train": [(X[0], "cat")] * 4}, r"must be a pair \(x, y\)"),
    ],
)
def test_mistakes_that_show_in_training_are_explained(options: dict[str, Any], found: str) -> None:
    with pytest.raises(UsageError, match=found):
        task(**options).train(linear_arrays(), Job(Plan()))


@pytest.mark.parametrize(
    ("odd", "found"),
    [
        ({"weight": np.zeros((3, 1), np.float32)}, r"weight has shape \(3, 1\)"),  # would be broadcast otherwise
        ({"more": np.zeros(1, np.float32)}, "more is not part of the model"),
    ],
)
def test_a_model_of_another_form_is_refused(odd: dict[str, Any], found: str) -> None:
    with pytest.raises(BadRequest, match=found):
        task().train({**linear_arrays(), **odd}, Job(Plan()))


def linear_arrays() -> dict[str, Any]:
    return task().initial_model().named()


@pytest.mark.parametrize("x", [X * np.nan, X * 1e30])
def test_a_loss_that_is_not_finite_is_no_result(x: Any) -> None:
    with pytest.raises(TaskFailed, match="learning_rate"):
        task(train=(x, Y)).train(linear_arrays(), Job(Plan(steps=20, learning_rate=1e10)))


def test_read_only_arrays_are_taken_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    received = task().initial_model()
    received.parameters.flags.writeable = False
    x = X.copy()
    x.flags.writeable = False
    once = task(train=(x, Y))
    once.train(received.named(), Job(Plan()))
    once.evaluate(received.named())
    assert [str(warning.message) for warning in recwarn] == []
