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
    ("cnn-fedmgda", COLOUR, 10, 797_962),  # FedMGDA+, Table 2
    ("cnn-dropout", GREY, 10, 21_840),  # Table 3
    ("cnn-femnist", GREY, 62, 1_206_590),  # Table 4
    ("vgg11", COLOUR, 10, 9_225_610),
    # The number of ResNet-18 for CIFAR, since both kinds of normalisation have equally many.
    ("resnet18-gn", COLOUR, 10, 11_173_962),
    # The convolutions of ResNet-18, a gain for each of their 4,800 filters, and the last layer.
    ("nfresnet18", COLOUR, 100, 11_159_232 + 4_800 + 51_300),
    ("nfresnet18-fedlf", COLOUR, 100, 1_792 + 17_232 + 32_928 + 131_392 + 6_500),
    ("cct", COLOUR, 10, 3_760_139),  # 3.76 million in its paper
    ("cct", COLOUR, 100, 6_912 + 65_536 + 257 + 7 * 526_336 + 512 + 25_700),
    ("char-lstm", TEXT, 80, 819_920),
    ("char-lstm-1", TEXT, 80, 640 + 272_384 + 20_560),
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
    shape = TEXT if name.startswith("char-lstm") else COLOUR
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
    reads_text = name.startswith("char-lstm")
    shape = (10,) if reads_text else {"vgg11": COLOUR}.get(name, (3, 16, 16))
    module, x = model(name, shape, 4), samples(shape, 4, 4)
    y = x[:, -1] if reads_text else torch.arange(4)
    rate = 0.01 if reads_text else {"vgg11": 0.0003}.get(name, 0.001)
    solver = torch.optim.Adam(module.parameters(), rate)
    losses = []
    torch.manual_seed(0)  # for dropout
    for _ in range(100 if name == "cnn-dropout" else 15):
        solver.zero_grad()
        loss = nn.functional.cross_entropy(module(x), y)
        loss.backward()
        solver.step()
        losses.append(loss.item())
    assert losses[0] < 4
    assert nn.functional.cross_entropy(module.eval()(x), y) < 0.7


def test_the_layers_of_fedmgdas_cnn_have_the_printed_order() -> None:
    names = [type(layer).__name__ for layer in model("cnn-fedmgda", COLOUR, 10)]
    convolution = ["Conv2d", "ReLU", "MaxPool2d", "LocalResponseNorm"]
    second = ["Conv2d", "ReLU", "LocalResponseNorm", "MaxPool2d"]
    dense = ["Linear", "ReLU", "Linear", "ReLU", "Linear"]
    assert names == [*convolution, *second, "Flatten", *dense]


def test_dropout_acts_in_training_only_and_repeats_with_its_seed() -> None:
    x = samples(GREY, 8, 10)
    for name in ("cnn-dropout", "cnn-femnist", "cct"):
        module = model(name, GREY, 10)
        torch.manual_seed(3)
        first, second = module(x), module(x)
        torch.manual_seed(3)
        assert torch.equal(module(x), first)
        assert not torch.allclose(first, second)
        module.eval()
        assert torch.equal(module(x), module(x))


@pytest.mark.parametrize("name", ["nfresnet18", "nfresnet18-fedlf"])
def test_a_network_without_normalisation_does_not_depend_on_the_size_of_its_filters(
    name: str,
) -> None:
    module, x = model(name, COLOUR, 10), samples(COLOUR, 2, 10)
    before = module(x)
    with torch.no_grad():
        for parameter, tensor in module.named_parameters():
            if tensor.dim() == 4 and not parameter.endswith("gain"):
                tensor.mul_(7.0).add_(0.3)
    torch.testing.assert_close(module(x), before, rtol=1e-2, atol=1e-2)


def test_signals_keep_their_size_without_normalisation() -> None:
    network = model("nfresnet18", COLOUR, 10)
    x, sizes = samples(COLOUR, 4, 10), []
    for layer in list(network)[:9]:  # the first convolution and the blocks
        x = layer(x)
        sizes.append(float(x.detach().square().mean()))
    assert all(0.3 < size < 3 for size in sizes), sizes


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
