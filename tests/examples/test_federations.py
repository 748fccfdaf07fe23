"""The examples with a `run.py` train in real processes, on digits and on Fashion-MNIST."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fairfleet.client.cli.new import TEMPLATES
from fairfleet.client.task import Abandoned, Job, Task
from fairfleet.common.training_plan import Plan
from tests.examples.support import (
    EXAMPLES,
    REAL,
    accuracies,
    check_trained,
    copied,
    module_of,
    needs_real_data,
    run_python,
)

NAMES = (
    "numpy-task",
    pytest.param("pytorch-cnn", marks=pytest.mark.torch),
    pytest.param("training-loop", marks=pytest.mark.torch),
)


def example_task(name: str, client: int = 0) -> Task:
    task: Task = module_of(EXAMPLES / name / "task.py").task(client=str(client), clients="3")
    return task


@pytest.mark.parametrize("name", NAMES)
def test_the_task_learns(name: str) -> None:
    task = example_task(name)
    assert isinstance(task, Task)
    model = task.initial_model().named()
    rate = 0.01 if name == "training-loop" else 0.2
    epochs = 3 if name == "pytorch-cnn" else 8
    trained = task.train(model, Job(Plan(epochs=epochs, learning_rate=rate)))
    before, after = task.evaluate(model).accuracy, task.evaluate(trained.arrays).accuracy
    assert before is not None
    assert after is not None
    assert after > max(0.75, before)


@pytest.mark.parametrize("name", NAMES)
def test_all_clients_begin_with_the_same_tensors_and_have_samples_of_their_own(name: str) -> None:
    tasks = [example_task(name, client) for client in range(3)]
    signatures = {task.initial_model().signature.to_json() for task in tasks}
    assert len(signatures) == 1
    assert sum(task.train_samples + task.test_samples for task in tasks) == 1797


@pytest.mark.parametrize("name", NAMES)
def test_the_same_plan_gives_the_same_model(name: str) -> None:
    task, job = example_task(name), Job(Plan(steps=3, learning_rate=0.01, seed=2**64 - 1))
    model = {name: array.copy() for name, array in task.initial_model().named().items()}
    first, second = (task.train(model, job).arrays for _ in range(2))
    assert all((first[name] == second[name]).all() for name in model)


@pytest.mark.parametrize(
    "name", ["numpy-task", pytest.param("training-loop", marks=pytest.mark.torch)]
)
def test_the_loop_stops_when_it_is_told(name: str) -> None:
    task = example_task(name)
    model, plan = task.initial_model().named(), Plan(steps=9, learning_rate=0.01)
    assert task.train(model, Job(plan, enough=lambda: True)).report.steps == 1

    def abandon(done: int, planned: int, loss: float) -> None:
        if done == 2:
            raise Abandoned

    with pytest.raises(Abandoned):
        task.train(model, Job(plan, progress=abandon))


def test_the_gradient_in_numpy_is_that_of_the_loss() -> None:
    module = module_of(EXAMPLES / "numpy-task" / "task.py")
    random = np.random.default_rng(0)
    model = {
        name: random.normal(0, 0.3, array.shape)
        for name, array in module.task().initial_model().named().items()
    }
    samples = module.Samples(random.normal(size=(9, 64)), random.integers(0, 10, 9))
    _, gradient = module.loss_and_gradient(model, samples)
    for name, array in model.items():
        direction = random.normal(size=array.shape)
        losses = [
            module.loss_and_gradient({**model, name: array + step * direction}, samples)[0]
            for step in (1e-6, -1e-6)
        ]
        slope = (losses[0] - losses[1]) / 2e-6
        assert slope == pytest.approx((gradient[name] * direction).sum(), abs=1e-6)


def test_the_numpy_task_reports_the_accuracy_of_its_worst_class() -> None:
    task = example_task("numpy-task")
    trained = task.train(task.initial_model().named(), Job(Plan(epochs=5, learning_rate=0.2)))
    evaluation = task.evaluate(trained.arrays)
    assert evaluation.accuracy is not None
    assert 0 <= evaluation.measures["worst_class"].value < evaluation.accuracy


def test_every_example_is_run_by_the_program_of_the_templates() -> None:
    program = (TEMPLATES / "numpy" / "run.py").read_text("utf-8")
    programs = {file.parent.name: file.read_text("utf-8") for file in EXAMPLES.glob("*/run.py")}
    assert set(programs) == {"numpy-task", "own-data", "pytorch-cnn", "training-loop"}
    assert set(programs.values()) == {program}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_it_trains_in_a_federation_of_real_processes(tmp_path: Path, name: str) -> None:
    example = copied(name, tmp_path)
    done = run_python(example, "run.py")
    check_trained(example)
    assert "20 rounds of 20 done" in done.stdout
    by_client = accuracies(done.stdout)
    assert set(by_client) == {"client-0", "client-1", "client-2"}
    assert min(by_client.values()) > 80


@pytest.mark.slow
@needs_real_data
@pytest.mark.parametrize("name", NAMES)
def test_it_trains_on_fashion_mnist(tmp_path: Path, name: str) -> None:
    example = copied(name, tmp_path)
    done = run_python(example, "run.py", "--data-dir", REAL, "--rounds", "1")
    check_trained(example)
    assert min(accuracies(done.stdout).values()) > 40  # after so few rounds; chance is 10
