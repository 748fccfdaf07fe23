"""Local training of small dense models, several clients at a time on every core.

Draws the same batches as the network client and takes the same steps, in another order of arithmetic: results agree
with `sequential` to within rounding. How clients are dealt to the cores depends on their number and the model's size
alone, so a repeat on as many workers gives the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fairfleet.client.batches import Indices, batches
from fairfleet.common.tensors import Model
from fairfleet.lab.cohort import FleetData, Measured, Rows, Samples, Served, Wanted, Work
from fairfleet.lab.perceptron import LayerGradient, Perceptron, Stack, backward, blame, judge
from fairfleet.lab.solvers import solver_for

GATHERED = 1 << 18  # values of samples that are laid out in one go, for as many steps as that is
LANE = 8  # clients are trained together at most, and more only of small models:
NEAR = 1 << 16  # so many weights in all, which stay near the core


class Place(NamedTuple):
    """A piece of work and the row that its update goes to."""

    work: Work
    row: int


class BatchedTrainer:
    def __init__(self, network: Perceptron, data: FleetData, workers: int) -> None:
        self.network, self.data, self.workers = network, data, workers
        self._train, self._test = _flat(data.train), _flat(data.test)
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)  # each worker is one thread; more beneath them would only wait for each other
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="trainer")

    def close(self) -> None:
        self._pool.shutdown()
        torch.set_num_threads(self._threads)

    def states(self) -> list[Model]:
        return []

    def train(self, model: Model, work: Sequence[Work], wanted: Wanted, rows: Rows) -> list[Measured]:
        flat, out = torch.from_numpy(model.parameters), torch.from_numpy(rows)
        lanes = self._lanes([Place(one, row) for row, one in enumerate(work)])
        found = self._pool.map(lambda lane: self._train_lane(flat, lane, wanted, out), lanes)
        by_row = {row: measured for lane in found for row, measured in lane.items()}
        return [by_row[row] for row in range(len(work))]

    def losses(self, model: Model, clients: Sequence[int]) -> list[float]:
        stack = Stack.view(self.network, torch.from_numpy(model.parameters))
        return list(self._pool.map(lambda client: self._measure(stack, self._train, client)[0], clients))

    def evaluate(self, model: Model) -> Served:
        stack = Stack.view(self.network, torch.from_numpy(model.parameters))
        clients = range(len(self.data.names))
        found = list(self._pool.map(lambda client: self._measure(stack, self._test, client), clients))
        return Served(np.array([accuracy for _, accuracy in found]), np.array([loss for loss, _ in found]))

    def _lanes(self, places: list[Place]) -> list[list[Place]]:
        """Who trains together: like with like. A client that takes all its samples at once has enough to do alone.

        Steps of models so small that all of them fit one lane are mostly Python, of which one thread runs at a time:
        two lanes would only wait for each other.
        """
        alone = [[place] for place in places if self._takes_all(place.work)]
        rest = [place for place in places if not self._takes_all(place.work)]
        rest.sort(key=lambda place: -self._steps(place.work))
        together = NEAR // self.network.size
        each = max(LANE, together) * self.workers
        count = 1 if len(rest) <= together else math.ceil(len(rest) / each) * self.workers  # as many for every worker
        return alone + [lane for k in range(count) if (lane := rest[k::count])]

    def _takes_all(self, work: Work) -> bool:
        return work.plan.batches_in_epoch(self._train.count(work.client)) == 1

    def _steps(self, work: Work) -> int:
        return work.plan.steps_for(self._train.count(work.client))

    @torch.inference_mode()
    def _train_lane(self, flat: Tensor, lane: list[Place], wanted: Wanted, rows: Tensor) -> dict[int, Measured]:
        shared, works = Stack.view(self.network, flat), [place.work for place in lane]
        stack = shared.copies(len(lane))
        solver = solver_for(works[0].plan, stack)
        # where the first step sees all the data, on the received model, its report comes with it
        reports = [] if self._takes_all(works[0]) else [self._report(shared, work, wanted) for work in works]
        for batch in self._batches(works):
            outputs = stack.forward(batch.x)
            gradients = backward(stack, outputs, blame(self.network, outputs[-1], batch.y, batch.weight))
            if not reports:
                kept = list(gradients)
                reports = [self._report_of(works[0], outputs[-1], batch.y, kept if wanted.gradient_norm else None)]
                gradients = iter(kept)
            solver.step(gradients)
        if wanted.loss_after:
            reports = [self._with_loss_after(stack, copy, work, reports[copy]) for copy, work in enumerate(works)]
        for copy, place in enumerate(lane):
            stack.update(flat, copy, rows[place.row])
        return {place.row: report for place, report in zip(lane, reports, strict=True)}

    def _batches(self, works: Sequence[Work]) -> Iterator[Batch]:
        """Every step's samples, one line per client that still trains; those with more steps come first."""
        samples = self._train
        if self._takes_all(works[0]):  # alone, and a sum over all samples knows no order
            x, y = samples.of(works[0].client)
            yield from repeat(Batch(x[None], y[None], 1.0 / len(y)), self._steps(works[0]))
            return
        planned = [list(batches(work.plan, samples.count(work.client))) for work in works]
        features = samples.x[0].shape[1]
        at, most = 0, max(1, GATHERED // (len(works) * works[0].plan.batch_size * features))
        while at < len(planned[0]):
            here = [mine for mine in planned if len(mine) > at]
            until = min(at + most, len(here[-1]))  # the next to be done
            yield from self._gathered(works, [mine[at:until] for mine in here])
            at = until

    def _gathered(self, works: Sequence[Work], chosen: Sequence[Sequence[Indices]]) -> Iterator[Batch]:
        """Several steps' samples in one go; shorter batches are filled up with samples of no weight."""
        samples, lengths = self._train, np.array([[len(one) for one in mine] for mine in chosen])
        width = int(lengths.max())
        real = np.arange(width) < lengths[..., None]
        places = np.zeros(real.shape, np.int64)
        places[real] = np.concatenate([one for mine in chosen for one in mine])
        at = torch.from_numpy(places).flatten(1)
        x, y = torch.empty(*at.shape, samples.x[0].shape[1]), torch.empty(at.shape, dtype=torch.int64)
        for copy, work in enumerate(works[: len(chosen)]):
            torch.index_select(samples.x[work.client], 0, at[copy], out=x[copy])
            torch.index_select(samples.y[work.client], 0, at[copy], out=y[copy])
        x, y = x.view(*places.shape, -1), y.view(places.shape)
        even = int(lengths.min()) == width
        weights = None if even else torch.from_numpy((real / lengths[..., None]).astype(np.float32)).unsqueeze(3)
        for step in range(len(chosen[0])):
            yield Batch(x[:, step], y[:, step], 1.0 / width if weights is None else weights[:, step])

    def _report(self, shared: Stack, work: Work, wanted: Wanted) -> Measured:
        x, y = self._train.of(work.client)
        outputs, y = shared.forward(x[None]), y[None]
        gradients = None
        if wanted.gradient_norm:
            gradients = list(backward(shared, outputs, blame(self.network, outputs[-1], y, 1.0 / y.shape[1])))
        return self._report_of(work, outputs[-1], y, gradients)

    def _report_of(self, work: Work, output: Tensor, y: Tensor, gradients: Sequence[LayerGradient] | None) -> Measured:
        loss, accuracy = self._judge(output, y)
        return Measured(loss, accuracy, None if gradients is None else self._norm(gradients), self._steps(work))

    def _with_loss_after(self, stack: Stack, copy: int, work: Work, report: Measured) -> Measured:
        x, y = self._train.of(work.client)
        loss, _ = self._judge(stack.one(copy).forward(x[None])[-1], y[None])
        return report._replace(loss_after=loss)

    @torch.inference_mode()
    def _measure(self, stack: Stack, samples: Samples, client: int) -> tuple[float, float]:
        """Loss and accuracy of one client."""
        x, y = samples.of(client)
        return self._judge(stack.forward(x[None])[-1], y[None]) if len(y) else (math.nan, math.nan)

    def _judge(self, output: Tensor, y: Tensor) -> tuple[float, float]:
        found = judge(self.network, output, y)
        return found.losses.mean(dtype=torch.float64).item(), found.right.double().mean().item()

    def _norm(self, gradients: Sequence[LayerGradient]) -> float:
        squares = 0.0
        for gradient in gradients:
            squares += gradient.weight().double().square().sum().item()
            if self.network.layers[gradient.layer].bias:
                squares += gradient.bias().double().square().sum().item()
        return math.sqrt(squares)


class Batch(NamedTuple):
    x: Tensor  # [clients, samples, features]
    y: Tensor
    weight: Tensor | float


def _flat(samples: Samples) -> Samples:
    return samples._replace(x=tuple(x.reshape(len(x), math.prod(x.shape[1:])) for x in samples.x))
