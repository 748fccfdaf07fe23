"""Measure what a training costs a client beside the steps themselves.

Each line compares the time inside `Task.train`, as the agent calls it, with the same steps in a
bare loop that knows nothing of FairFleet: the same batches of the same data, the same solver, no
report. The runs alternate, and the fastest of each counts, because other work on the machine only
adds time. `cpu_ratio_to_bare_steps` is the same in processor time of the training thread, which is
steadier on a busy machine. `exact_passes` counts the passes over the training data that only
measure.

    python benchmarks/client_cost.py --json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fairfleet.client.agent.heartbeat import Heartbeat
from fairfleet.client.softmax import SoftmaxTask
from fairfleet.client.task import Job, Task
from fairfleet.client.torch import TorchTask
from fairfleet.client.training.batches import batches
from fairfleet.client.training.budget import Budget, Training
from fairfleet.common import wire
from fairfleet.common.tensors import Model
from fairfleet.common.training_plan import Plan
from fairfleet.proto.v1 import fleet_pb2 as pb
from fairfleet.server.settings import NamedChoice, ServerSettings

RULES = ("fedavg", "adafed", "adafedadam")  # no loss, the loss, the loss and a gradient norm
PLANS = {"50 steps": Plan(steps=50, batch_size=32), "1 epoch": Plan(epochs=1, batch_size=32)}
CLASSES, SIDE = 10, 28


class Subject(NamedTuple):
    """A task, and its steps in a bare loop."""

    task: Task
    bare_steps: Callable[[Plan], None]


class QuietConnection:
    """What the heartbeat's thread needs of a connection; its server wants every task."""

    stopped = False
    joined = pb.JoinResponse(heartbeat_seconds=7.5)

    def heartbeat(self, **fields: Any) -> pb.HeartbeatResponse:
        """Answer that the task is still wanted."""
        return pb.HeartbeatResponse()


def cnn() -> nn.Module:
    """Return a small convolutional network."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * (SIDE // 4) ** 2, CLASSES),
    )


def softmax_subject(samples: int) -> Subject:
    """Return softmax regression in numpy."""
    x, y = data(samples)
    x = x.reshape(samples, -1)
    task = SoftmaxTask((x, y), classes=CLASSES)

    def bare_steps(plan: Plan) -> None:
        weight = np.zeros((CLASSES, x.shape[1]), np.float32)
        bias = np.zeros(CLASSES, np.float32)
        rate = np.float32(plan.learning_rate)
        for indices in batches(plan, samples):
            features, labels = x[indices], y[indices]
            logits = features @ weight.T + bias
            logits -= logits.max(1, keepdims=True)
            error = np.exp(logits)
            error /= error.sum(1, keepdims=True)
            error[np.arange(len(labels)), labels] -= 1.0
            error /= len(labels)
            weight -= rate * (error.T @ features)
            bias -= rate * error.sum(0)

    return Subject(task, bare_steps)


def torch_subject(samples: int) -> Subject:
    """Return the small network in torch, on the CPU."""
    x, y = data(samples)
    task = TorchTask(cnn, train=(x, y), loss=cross_entropy, device="cpu")
    images, labels, module = torch.from_numpy(x), torch.from_numpy(y), cnn()

    def bare_steps(plan: Plan) -> None:
        solver = torch.optim.SGD(module.parameters(), plan.learning_rate)
        module.train()
        for indices in batches(plan, samples):
            selected = torch.from_numpy(indices)
            solver.zero_grad()
            cross_entropy(module(images[selected]), labels[selected]).backward()
            solver.step()

    return Subject(task, bare_steps)


def data(samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Return random images and labels."""
    random = np.random.default_rng(0)
    images = random.normal(size=(samples, 1, SIDE, SIDE)).astype(np.float32)
    return images, random.integers(0, CLASSES, samples)


def loss_plan_message(rule: str, plan: Plan) -> tuple[pb.Plan, bool]:
    """Return the plan that a server with this rule sends, and whether it wants a gradient norm."""
    settings = ServerSettings(rule=NamedChoice(name=rule), plan=plan)
    wants_norm = "gradient_norm" in settings.recipe().rule.needs().reports
    return wire.plan_out(plan, settings.loss_plan), wants_norm


class Seconds(NamedTuple):
    """How long something took."""

    wall: float
    cpu: float  # of this thread


def timed(work: Callable[[], object]) -> Seconds:
    """Do the work, and return how long it took."""
    wall, cpu = time.perf_counter(), time.thread_time()
    work()
    return Seconds(time.perf_counter() - wall, time.thread_time() - cpu)


def fastest(runs: list[Seconds]) -> Seconds:
    """Return the least wall time and the least processor time."""
    return Seconds(min(run.wall for run in runs), min(run.cpu for run in runs))


def train_once(task: Task, model: Model, rule: str, plan: Plan, heartbeat: Heartbeat) -> Seconds:
    """Return the time inside `Task.train`, called as the agent calls it."""
    message, wants_norm = loss_plan_message(rule, plan)
    training = Training(wire.plan_in(message), task.train_samples, Budget(seconds=3600))
    with heartbeat.during("train/0/0/bench") as progress:
        losses = wire.loss_plan_in(message)
        job = Job(training.plan, wants_norm, progress, enough=training.enough, losses=losses)
        return timed(lambda: task.train(model.named(), job))


def exact_passes(rule: str, plan: Plan) -> int:
    """Return how many passes over all data the rule's plan takes beside the steps."""
    message, wants_norm = loss_plan_message(rule, plan)
    losses = wire.loss_plan_in(message)
    return (losses.before == "exact" or wants_norm) + (losses.after == "exact")


def measure(
    name: str, subject: Subject, rule: str, plan_name: str, repeats: int, heartbeat: Heartbeat
) -> dict[str, Any]:
    """Return one line of the result."""
    plan, model = PLANS[plan_name], subject.task.initial_model()
    trained, bare = list[Seconds](), list[Seconds]()
    for _ in range(repeats + 1):  # the first run of each warms up
        bare.append(timed(lambda: subject.bare_steps(plan)))
        trained.append(train_once(subject.task, model, rule, plan, heartbeat))
    seconds, bare_seconds = fastest(trained[1:]), fastest(bare[1:])
    return {
        "rule": rule,
        "task": name,
        "plan": plan_name,
        "samples": subject.task.train_samples,
        "ratio_to_bare_steps": round(seconds.wall / bare_seconds.wall, 3),
        "cpu_ratio_to_bare_steps": round(seconds.cpu / bare_seconds.cpu, 3),
        "train_seconds": round(seconds.wall, 4),
        "bare_steps_seconds": round(bare_seconds.wall, 4),
        "exact_passes": exact_passes(rule, plan),
    }


SUBJECTS = {"SoftmaxTask": softmax_subject, "TorchTask": torch_subject}


def lines(
    tasks: Sequence[str], rules: Sequence[str], samples: int, repeats: int
) -> Iterator[dict[str, Any]]:
    """Yield a line for each task, plan and rule."""
    heartbeat = Heartbeat(QuietConnection())  # type: ignore[arg-type]
    for name in tasks:
        subject = SUBJECTS[name](samples)
        for plan_name in PLANS:
            for rule in rules:
                yield measure(name, subject, rule, plan_name, repeats, heartbeat)


def main() -> None:
    """Print one line per measurement."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=7, help="alternating runs of each kind")
    parser.add_argument("--rule", dest="rules", action="append", help="may be repeated")
    parser.add_argument("--task", dest="tasks", choices=SUBJECTS, action="append")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tasks, rules = options.tasks or list(SUBJECTS), options.rules or RULES
    for line in lines(tasks, rules, options.samples, options.repeats):
        if options.json:
            print(json.dumps(line), flush=True)
        else:
            print(", ".join(f"{key}: {value}" for key, value in line.items()), flush=True)


if __name__ == "__main__":
    main()
