"""The models of the papers have the published sizes, start from their seed, and learn."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from fairfleet.common.errors import UsageError
from fairfleet.lab.models import MODELS, model


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Use one thread: two are slower for small batches, above all when tests run in parallel."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


GREY, COLOUR, TEXT = (1, 28, 28), (3, 32, 32), (80,)
# Name, shape of one sample, classes, and the published or hand-counted number of parameters.
PARAMETER_COUNTS = [
    ("softmax", GREY, 10, 7_850),
    ("mlp:200,200", GREY, 10, 784 * 200 + 200 + 200 * 200 + 200 + 200 * 10 + 10),
    ("mlp:200,200", COLOUR, 10, 3072 * 200 + 200 + 200 * 200 + 200 + 200 * 10 + 10),
    ("mlp", GREY, 10, 199_210),  # McMahan's 2NN
    ("cnn-mcmahan", GREY, 10, 1_663_370),  # as its paper says
    ("cnn-leaf", GREY, 62, 6_603_710),  # as LEAF and its users say
    ("cnn-fedfv", COLOUR, 10, 4_864 + 102_464 + 614_784 + 73_920 + 1_930),
    ("vgg11", COLOUR, 10, 9_225_610),
    # The number of ResNet-18 for CIFAR, since both kinds of normalisation have equally many.
    ("resnet18-gn", COLOUR, 10, 11_173_962),
    ("char-lstm", TEXT, 80, 819_920),
    ("char-lstm:96", TEXT, 2, 96 * 8 + 272_384 + 526_336 + 514),
]


def samples(shape: tuple[int, ...], count: int, classes: int) -> torch.Tensor:
    """Draw random images, or random characters if the shape has one axis."""
    # The seed is not one of the models' own, since draws of one seed are alike.
    generator = torch.Generator().manual_seed(1234)
    if len(shape) == 1:
        return torch.randint(0, min(classes, 80), (count, *shape), generator=generator)
    return torch.randn(count, *shape, generator=generator)


def test_every_model_has_a_known_count() -> None:
    assert {name.partition(":")[0] for name, *_ in PARAMETER_COUNTS} == MODELS.keys()


@pytest.mark.parametrize(("name", "shape", "classes", "count"), PARAMETER_COUNTS)
def test_a_model_has_the_published_number_of_parameters_and_gives_a_score_for_each_class(
    name: str, shape: tuple[int, ...], classes: int, count: int
) -> None:
    module = model(name, shape, classes)
    assert sum(tensor.numel() for tensor in module.parameters()) == count
    assert not list(module.buffers())
    assert module(samples(shape, 2, classes)).shape == (2, classes)


@pytest.mark.parametrize("name", MODELS)
def test_the_first_parameters_depend_on_the_seed_alone(name: str) -> None:
    shape = TEXT if name == "char-lstm" else COLOUR
    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    first = model(name, shape, 10, seed=7).state_dict()
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(2)
    again = model(name, shape, 10, seed=7).state_dict()
    another_seed = model(name, shape, 10, seed=8).state_dict()
    assert all(torch.equal(again[key], value) for key, value in first.items())
    assert not all(torch.equal(another_seed[key], value) for key, value in first.items())


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_model_learns_a_few_samples_by_heart(name: str) -> None:
    """The loss starts near that of guessing among four classes, 1.39, and falls well below it."""
    shape = {"char-lstm": (10,), "vgg11": COLOUR}.get(name, (3, 16, 16))
    module, x = model(name, shape, 4), samples(shape, 4, 4)
    y = x[:, -1] if name == "char-lstm" else torch.arange(4)
    solver = torch.optim.Adam(
        module.parameters(), {"char-lstm": 0.01, "vgg11": 0.0003}.get(name, 0.001)
    )
    losses = []
    for _ in range(15):
        solver.zero_grad()
        loss = nn.functional.cross_entropy(module(x), y)
        loss.backward()
        solver.step()
        losses.append(loss.item())
    assert losses[0] < 4
    assert losses[-1] < 0.7


def test_the_ending_probabilities_adds_a_softmax() -> None:
    outputs = model("mlp:200,200+probabilities", COLOUR, 10)(samples(COLOUR, 3, 10))
    assert outputs.sum(1).tolist() == pytest.approx([1, 1, 1])
    assert outputs.min() >= 0


def test_a_model_may_start_at_zero() -> None:
    assert all(not tensor.any() for tensor in model("softmax+zero", GREY, 3).parameters())
    weight, bias = model("softmax+zero-bias+probabilities", GREY, 3).parameters()
    assert weight.any()
    assert not bias.any()


@pytest.mark.parametrize(
    "name", ["", "mpl", "softmax:3", "mlp:0", "mlp:2,x", "mlp:", "softmax+soft", "resnet18"]
)
def test_an_unknown_model_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"there are softmax|takes whole numbers"):
        model(name, GREY, 10)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("cnn-fedfv", (28, 28)),
        ("resnet18-gn", (784,)),
        ("vgg11", (3, 16, 16)),
        ("cnn-fedfv", (3, 8, 8)),
    ],
)
def test_samples_that_do_not_fit_a_model_are_explained(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match=r"channels x height x width|too small"):
        model(name, shape, 10)
