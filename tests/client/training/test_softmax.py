"""Softmax regression in numpy: its model, gradient, report and refusals."""

from __future__ import annotations

import numpy as np
import pytest

from fairfleet.client.softmax import SoftmaxTask
from fairfleet.client.task import Abandoned, Job, Task
from fairfleet.common.errors import BadRequest, TaskFailed, UsageError
from fairfleet.common.training_plan import Plan

random = np.random.default_rng(5)
FEATURES = random.normal(size=(23, 2, 3))
LABELS = random.integers(0, 4, 23)


def task() -> SoftmaxTask:
    return SoftmaxTask((FEATURES, LABELS), test=(FEATURES[:7], LABELS[:7]), classes=4)


def test_softmax_is_a_task_with_one_layer() -> None:
    assert isinstance(task(), Task)
    assert [str(tensor) for tensor in task().initial_model().signature.tensors] == [
        "linear.weight float32[4, 6] (parameters)",
        "linear.bias float32[4] (parameters)",
    ]
    assert {tensor.layer for tensor in task().initial_model().signature.tensors} == {"linear"}


def test_at_zero_the_loss_is_that_of_guessing_and_the_gradient_is_the_textbook_one() -> None:
    zero = task().initial_model().named()
    report = task().train(zero, Job(Plan(epochs=3), want_gradient_norm=True)).report
    assert report.loss_before == pytest.approx(np.log(4))
    assert report.loss_after < report.loss_before
    assert (report.samples, report.steps, report.learning_rate) == (23, 3, 0.1)
    error = (np.full((23, 4), 0.25) - np.eye(4)[LABELS]) / 23
    gradient = np.hstack([error.T @ FEATURES.reshape(23, 6), error.sum(0)[:, None]])
    assert report.gradient_norm == pytest.approx(np.linalg.norm(gradient))


def test_the_gradient_norm_is_reported_only_on_request() -> None:
    assert task().train(task().initial_model().named(), Job(Plan())).report.gradient_norm is None


def test_training_does_not_change_the_received_model() -> None:
    received = task().initial_model()
    received.parameters.flags.writeable = False
    trained = task().train(received.named(), Job(Plan()))
    assert not received.parameters.any()
    assert trained.arrays["linear.weight"].any()


def test_progress_is_reported_after_each_step_and_may_end_the_training() -> None:
    reported: list[tuple[int, int]] = []

    def progress(done: int, planned: int, loss: float) -> None:
        assert loss > 0
        reported.append((done, planned))
        if done == 2:
            raise Abandoned

    with pytest.raises(Abandoned):
        task().train(task().initial_model().named(), Job(Plan(steps=5), progress=progress))
    assert reported == [(1, 5), (2, 5)]


def test_evaluation_is_on_the_test_set() -> None:
    model = task().initial_model()
    model.named()["linear.bias"][2] = 1.0  # predicts 2 for every sample
    evaluation = task().evaluate(model.named())
    assert evaluation.samples == 7
    assert evaluation.accuracy == pytest.approx(np.mean(LABELS[:7] == 2))


def test_without_a_test_set_there_is_nothing_to_evaluate() -> None:
    bare = SoftmaxTask((FEATURES, LABELS), classes=4)
    assert bare.test_samples == 0
    with pytest.raises(UsageError, match="test="):
        bare.evaluate(bare.initial_model().named())


@pytest.mark.parametrize(
    ("features", "labels", "message"),
    [
        (FEATURES[:0], LABELS[:0], "training set is empty"),
        (FEATURES, LABELS[:5], "23 samples but 5 labels"),
        (FEATURES, LABELS + 1, "from 1 to 4"),
        (FEATURES, LABELS - 1, "from -1 to 2"),
        (FEATURES, LABELS / 2, "float64"),
    ],
)
def test_data_that_cannot_be_trained_on_are_refused(
    features: object, labels: object, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        SoftmaxTask((features, labels), classes=4)  # type: ignore[arg-type]


def test_a_model_of_another_shape_is_refused() -> None:
    narrower = SoftmaxTask((FEATURES[:, :1], LABELS), classes=4).initial_model()
    with pytest.raises(BadRequest, match=r"linear\.weight has shape"):
        task().train(narrower.named(), Job(Plan()))


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning", "ignore:invalid:RuntimeWarning")
def test_a_training_that_diverges_raises_task_failed() -> None:
    with pytest.raises(TaskFailed, match="learning_rate"):
        task().train(
            task().initial_model().named(),
            Job(Plan(steps=50, learning_rate=1e38, weight_decay=1.0)),
        )
