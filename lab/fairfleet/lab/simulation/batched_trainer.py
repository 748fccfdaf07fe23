"""Local training of small dense models, several clients at a time on every core.

It draws the same batches as the network client and takes the same steps, in another order of
arithmetic: results agree with the sequential trainer to within rounding. How clients are divided
among the cores depends only on their number and the size of the model, so a repetition with the
same number of workers gives the same bits.
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

from fairfleet.client.training.batches import Indices, batches
from fairfleet.common.tensors import Model
from fairfleet.lab.simulation.batched_solvers import solver_for
from fairfleet.lab.simulation.dense_network import (
    DenseNetwork,
    LayerGradient,
    StackedWeights,
    backward,
    output_gradient,
    sample_losses,
)
from fairfleet.lab.simulation.trainer import (
    ClientSamples,
    ClientScores,
    FleetData,
    Rows,
    TrainMeasures,
    TrainRequest,
    Work,
)

# Number of input values that are copied together, for as many steps as they make up.
GATHERED_VALUES = 1 << 18
# At most this many clients are trained together, and more only if their models are so small ...
LANE_CLIENTS = 8
# ... that all their weights together are no more than this and stay in the cache of a core.
CACHED_WEIGHTS = 1 << 16


class LaneEntry(NamedTuple):
    """One client's work, and the number of the row that its update goes to."""

    work: Work
    row: int


class Batch(NamedTuple):
    """The samples of one step, for all clients that still train."""

    x: Tensor  # [clients, samples, features]
    y: Tensor
    weight: Tensor | float


class BatchedTrainer:
    """A trainer for dense networks. Clients of one lane train together, lanes in parallel."""

    def __init__(self, network: DenseNetwork, data: FleetData, workers: int) -> None:
        self.network, self.data, self.workers = network, data, workers
        self._train, self._test = _flat(data.train), _flat(data.test)
        self._threads = torch.get_num_threads()
        # Each worker is one thread; torch's threads below them would only wait for each other.
        torch.set_num_threads(1)
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="trainer")

    def close(self) -> None:
        """End the workers, and restore torch's number of threads."""
        self._pool.shutdown()
        torch.set_num_threads(self._threads)

    def states(self) -> list[Model]:
        """Return an empty list: dense networks have no buffers and counters."""
        return []

    def train(
        self, model: Model, work: Sequence[Work], request: TrainRequest, rows: Rows
    ) -> list[TrainMeasures]:
        """Train each client and write its update (received - trained) into its row."""
        flat, out = torch.from_numpy(model.parameters), torch.from_numpy(rows)
        lanes = self._lanes([LaneEntry(client_work, row) for row, client_work in enumerate(work)])
        results = self._pool.map(lambda lane: self._train_lane(flat, lane, request, out), lanes)
        by_row = {row: measures for lane in results for row, measures in lane.items()}
        return [by_row[row] for row in range(len(work))]

    def losses(self, model: Model, clients: Sequence[int]) -> list[float]:
        """Return the loss of each of these clients on its training data."""
        stack = StackedWeights.view(self.network, torch.from_numpy(model.parameters))
        return list(
            self._pool.map(lambda client: self._measure(stack, self._train, client)[0], clients)
        )

    def evaluate(self, model: Model) -> ClientScores:
        """Return the scores of every client on its own test data."""
        stack = StackedWeights.view(self.network, torch.from_numpy(model.parameters))
        clients = range(len(self.data.names))
        scores = list(
            self._pool.map(lambda client: self._measure(stack, self._test, client), clients)
        )
        return ClientScores(
            np.array([accuracy for _, accuracy in scores]), np.array([loss for loss, _ in scores])
        )

    def _lanes(self, entries: list[LaneEntry]) -> list[list[LaneEntry]]:
        """Divide the clients into lanes, whose clients train together and take similar steps.

        A client that uses all its samples in each step is enough work for a lane of its own. Steps
        of models so small that all of them fit one lane are mostly Python, of which one thread
        runs at a time: two such lanes would only wait for each other.
        """
        alone = [[entry] for entry in entries if self._is_full_batch(entry.work)]
        rest = [entry for entry in entries if not self._is_full_batch(entry.work)]
        rest.sort(key=lambda entry: -self._steps(entry.work))
        cached_clients = CACHED_WEIGHTS // self.network.size
        if len(rest) <= cached_clients:
            count = 1
        else:  # Every worker gets the same number of lanes.
            clients_at_once = max(LANE_CLIENTS, cached_clients) * self.workers
            count = math.ceil(len(rest) / clients_at_once) * self.workers
        return alone + [lane for k in range(count) if (lane := rest[k::count])]

    def _is_full_batch(self, work: Work) -> bool:
        return work.plan.batches_in_epoch(self._train.count(work.client)) == 1

    def _steps(self, work: Work) -> int:
        return work.plan.steps_for(self._train.count(work.client))

    @torch.inference_mode()
    def _train_lane(
        self, flat: Tensor, lane: list[LaneEntry], request: TrainRequest, rows: Tensor
    ) -> dict[int, TrainMeasures]:
        """Train the clients of a lane, write their rows, and return their measures by row."""
        received, works = StackedWeights.view(self.network, flat), [entry.work for entry in lane]
        stack = received.copies(len(lane))
        measures = self._take_steps(received, stack, works, request)
        if request.loss_after:
            measures = [
                self._with_loss_after(stack, copy, work, measures[copy])
                for copy, work in enumerate(works)
            ]
        for copy, entry in enumerate(lane):
            stack.write_update(flat, copy, rows[entry.row])
        return {entry.row: measured for entry, measured in zip(lane, measures, strict=True)}

    def _take_steps(
        self,
        received: StackedWeights,
        stack: StackedWeights,
        works: list[Work],
        request: TrainRequest,
    ) -> list[TrainMeasures]:
        """Take all steps, and return the measures of the received model."""
        solver = solver_for(works[0].plan, stack)
        full_batch = self._is_full_batch(works[0])
        measures = [] if full_batch else [self._received(received, w, request) for w in works]
        for batch in self._batches(works):
            outputs = stack.forward(batch.x)
            error = output_gradient(self.network, outputs[-1], batch.y, batch.weight)
            gradients = backward(stack, outputs, error)
            # The first step of a full-batch client is on the received model and sees all the data,
            # so it gives the measures at no further cost.
            if not measures:
                gradient_list = list(gradients)
                reported = gradient_list if request.gradient_norm else None
                measures = [self._measures(works[0], outputs[-1], batch.y, reported)]
                gradients = iter(gradient_list)
            solver.step(gradients)
        return measures

    def _batches(self, works: Sequence[Work]) -> Iterator[Batch]:
        """Yield each step's samples, one row per client that still trains.

        The clients with more steps come first in `works`.
        """
        samples = self._train
        if self._is_full_batch(works[0]):
            # The client is alone in its lane, and a sum over all samples has no order.
            x, y = samples.of(works[0].client)
            yield from repeat(Batch(x[None], y[None], 1.0 / len(y)), self._steps(works[0]))
            return
        planned = [list(batches(work.plan, samples.count(work.client))) for work in works]
        step_values = len(works) * works[0].plan.batch_size * samples.x[0].shape[1]
        step, max_steps = 0, max(1, GATHERED_VALUES // step_values)
        while step < len(planned[0]):
            training = [client_batches for client_batches in planned if len(client_batches) > step]
            # The last of these clients is the next one to finish.
            end = min(step + max_steps, len(training[-1]))
            yield from self._gather(works, [own[step:end] for own in training])
            step = end

    def _gather(
        self, works: Sequence[Work], chosen: Sequence[Sequence[Indices]]
    ) -> Iterator[Batch]:
        """Yield several steps' batches, copied together.

        Batches shorter than the longest are filled up with samples of weight 0.
        """
        lengths = np.array([[len(indices) for indices in own] for own in chosen])
        width = int(lengths.max())
        is_sample = np.arange(width) < lengths[..., None]
        indices = np.zeros(is_sample.shape, np.int64)
        indices[is_sample] = np.concatenate([batch for own in chosen for batch in own])
        x, y = self._select([work.client for work in works[: len(chosen)]], indices)
        if int(lengths.min()) == width:
            weights = None
        else:
            shares = (is_sample / lengths[..., None]).astype(np.float32)
            weights = torch.from_numpy(shares).unsqueeze(3)
        for step in range(len(chosen[0])):
            weight = 1.0 / width if weights is None else weights[:, step]
            yield Batch(x[:, step], y[:, step], weight)

    def _select(
        self, clients: Sequence[int], indices: np.ndarray[tuple[int, ...], np.dtype[np.int64]]
    ) -> tuple[Tensor, Tensor]:
        """Copy the samples with these indices [clients, steps, samples] of each client."""
        samples, flat = self._train, torch.from_numpy(indices).flatten(1)
        x = torch.empty(*flat.shape, samples.x[0].shape[1])
        y = torch.empty(flat.shape, dtype=torch.int64)
        for row, client in enumerate(clients):
            torch.index_select(samples.x[client], 0, flat[row], out=x[row])
            torch.index_select(samples.y[client], 0, flat[row], out=y[row])
        return x.view(*indices.shape, -1), y.view(indices.shape)

    def _received(
        self, received: StackedWeights, work: Work, request: TrainRequest
    ) -> TrainMeasures:
        """Measure the received model on all training samples of a client."""
        x, y = self._train.of(work.client)
        outputs, y = received.forward(x[None]), y[None]
        gradients = None
        if request.gradient_norm:
            error = output_gradient(self.network, outputs[-1], y, 1.0 / y.shape[1])
            gradients = list(backward(received, outputs, error))
        return self._measures(work, outputs[-1], y, gradients)

    def _measures(
        self, work: Work, output: Tensor, y: Tensor, gradients: Sequence[LayerGradient] | None
    ) -> TrainMeasures:
        loss, accuracy = self._scores(output, y)
        norm = None if gradients is None else self._norm(gradients)
        return TrainMeasures(loss, accuracy, norm, self._steps(work))

    def _with_loss_after(
        self, stack: StackedWeights, copy: int, work: Work, measures: TrainMeasures
    ) -> TrainMeasures:
        x, y = self._train.of(work.client)
        loss, _ = self._scores(stack.single(copy).forward(x[None])[-1], y[None])
        return measures._replace(loss_after=loss)

    @torch.inference_mode()
    def _measure(
        self, stack: StackedWeights, samples: ClientSamples, client: int
    ) -> tuple[float, float]:
        """Return loss and accuracy of one client."""
        x, y = samples.of(client)
        return self._scores(stack.forward(x[None])[-1], y[None]) if len(y) else (math.nan, math.nan)

    def _scores(self, output: Tensor, y: Tensor) -> tuple[float, float]:
        """Return mean loss and accuracy."""
        scores = sample_losses(self.network, output, y)
        return scores.losses.mean(dtype=torch.float64).item(), scores.right.double().mean().item()

    def _norm(self, gradients: Sequence[LayerGradient]) -> float:
        squares = 0.0
        for gradient in gradients:
            squares += gradient.weight().double().square().sum().item()
            if self.network.layers[gradient.layer].bias:
                squares += gradient.bias().double().square().sum().item()
        return math.sqrt(squares)


def _flat(samples: ClientSamples) -> ClientSamples:
    """Return the samples with each input as a flat vector."""
    return samples._replace(x=tuple(x.reshape(len(x), math.prod(x.shape[1:])) for x in samples.x))
