"""FedCKA's regularisation: similarity of layers, what it adds to training, and what it leaves."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fairfleet.client.task import Job
from fairfleet.client.torch import TorchTask
from fairfleet.client.training.layer_similarity import LayerSimilarity, alignment
from fairfleet.common.errors import UsageError
from fairfleet.common.training_plan import Plan

PLAN = Plan(epochs=3, batch_size=16, learning_rate=0.05)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3)
    )


def data(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(48, 6, generator=generator)
    return x, (x @ torch.randn(6, 3, generator=generator)).argmax(1)


def task(similarity: LayerSimilarity | None, seed: int = 0) -> TorchTask:
    torch.manual_seed(5)
    return TorchTask(network, train=data(seed), loss=cross_entropy, similarity=similarity)


def trained(similarity: LayerSimilarity | None, *models: int) -> dict[str, np.ndarray]:
    """Return the result of trainings in a row, each from the initial model of a seed."""
    own, result = task(similarity), {}
    for seed in models:
        torch.manual_seed(seed)
        received = {name: tensor.numpy() for name, tensor in network().state_dict().items()}
        result = own.train(received, Job(PLAN)).arrays
    return result


def test_alignment_is_one_for_rotated_and_scaled_features_and_small_for_unrelated_ones() -> None:
    torch.manual_seed(1)
    a, unrelated = torch.randn(200, 5), torch.randn(200, 5)
    rotation, _ = torch.linalg.qr(torch.randn(5, 5))
    assert alignment(a, 3 * a @ rotation + 7) == pytest.approx(1, abs=1e-5)
    assert alignment(a, unrelated) < 0.2
    assert alignment(a, torch.ones(200, 4)) == 0
    assert alignment(a[:1], a[:1]) == 0  # one sample has no products around its mean


def test_alignment_is_that_of_the_features_products() -> None:
    torch.manual_seed(2)
    a, b = torch.randn(30, 4).double(), torch.randn(30, 7).double()
    a, b = a - a.mean(0), b - b.mean(0)
    by_features = (b.T @ a).norm() ** 2 / ((a.T @ a).norm() * (b.T @ b).norm())
    assert alignment(a, b).item() == pytest.approx(by_features.item())


def test_the_first_training_and_mu_of_zero_are_training_without_it() -> None:
    for once, plain in (
        (trained(LayerSimilarity(), 1), trained(None, 1)),
        (trained(LayerSimilarity(mu=0.0), 1, 2), trained(None, 1, 2)),
    ):
        assert all(np.array_equal(once[name], plain[name]) for name in plain)


def test_later_trainings_end_nearer_to_the_received_model_than_to_the_last_one() -> None:
    """The first two layers are compared; s is the similarity to the received model, t the other."""
    x, _ = data(0)
    torch.manual_seed(2)
    received, previous = network(), network()
    last = trained(None, 1)
    previous.load_state_dict({name: torch.from_numpy(array) for name, array in last.items()})

    def _difference(result: dict[str, np.ndarray]) -> float:
        own, total = network(), 0.0
        own.load_state_dict({name: torch.from_numpy(array) for name, array in result.items()})
        for layer in (0, 3):
            parts = [nn.Sequential(*list(m)[: layer + 1]).eval() for m in (own, received, previous)]
            a, b, c = (part(x).detach() for part in parts)
            total += float(alignment(a, b) - alignment(a, c))
        return total

    plain = _difference(trained(None, 1, 2))
    assert _difference(trained(LayerSimilarity(mu=3.0), 1, 2)) > plain
    assert _difference(trained(LayerSimilarity(mu=30.0), 1, 2)) > plain


def test_the_penalty_is_log_two_where_the_model_is_as_near_to_both() -> None:
    similarity, module = LayerSimilarity(layers=2, mu=3.0), network()
    assert similarity.penalty(module, data(0)[0]) is None
    similarity.end(module)
    similarity.begin(module)
    penalty = similarity.penalty(module, data(0)[0])
    assert penalty is not None
    assert penalty.item() == pytest.approx(3 * np.log(2))


def test_the_reported_losses_are_those_of_the_task_alone() -> None:
    own = task(LayerSimilarity(mu=1000.0))
    model = own.initial_model().named()
    own.train(model, Job(PLAN))
    report = own.train(model, Job(Plan(epochs=1, batch_size=0, learning_rate=1e-6))).report
    assert report.loss_before == pytest.approx(own.training_loss(model), rel=0.3)
    assert report.loss_before < 3  # the penalty is 1000 log 2


def test_a_personal_model_is_trained_without_it() -> None:
    similar, plain = task(LayerSimilarity()), task(None)
    model = plain.initial_model().named()
    for own in (similar, plain):
        own.train(model, Job(PLAN))
    personal = [own.train(model, Job(PLAN, anchor=model)).arrays for own in (similar, plain)]
    assert all(np.array_equal(personal[0][name], personal[1][name]) for name in model)


def test_recurrent_models_are_compared_by_their_states() -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.lstm = nn.Embedding(9, 4), nn.LSTM(4, 5, batch_first=True)
            self.output = nn.Linear(5, 9)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.output(self.lstm(self.embedding(x))[0][:, -1])
            return logits

    similarity, module = LayerSimilarity(), Reader()
    similarity.end(module)
    similarity.begin(module)
    penalty = similarity.penalty(module, torch.arange(24).reshape(4, 6) % 9)
    assert penalty is not None
    penalty.backward()
    assert module.lstm.weight_ih_l0.grad is not None


@pytest.mark.parametrize(("layers", "mu"), [(0, 1.0), (2, -1.0), (2, float("nan"))])
def test_impossible_parameters_are_refused(layers: int, mu: float) -> None:
    with pytest.raises(UsageError, match="LayerSimilarity needs"):
        LayerSimilarity(layers, mu)
