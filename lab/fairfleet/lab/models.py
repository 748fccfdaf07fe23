"""The models of the papers by name: `softmax`, `mlp:200,200`, `cnn-fedfv`, `resnet18-gn`, `vgg11`, `char-lstm`, …

A model starts from its seed alone: the global random state is neither used nor changed. None has batch normalisation,
whose running means belong to no client in particular.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fairfleet.common.errors import UsageError

GROUPS = 32  # of group normalisation, as its authors have it
EMBEDDING, HIDDEN = 8, 256  # of the character model, as in LEAF
IMAGE_AXES = 3


class Wanted(NamedTuple):
    """What a model is asked for."""

    name: str
    parameter: str | None  # the text after a colon
    shape: tuple[int, ...]  # of one sample
    classes: int

    def numbers(self, default: list[int]) -> list[int]:
        if self.parameter is None:
            return default
        found = [int(part) if part.strip().isdecimal() else 0 for part in self.parameter.split(",")]
        if min(found) < 1:
            raise UsageError(
                f"{self.name} takes whole numbers from 1, as in {self.name}:200,200 (found {self.parameter!r})"
            )
        return found

    def channels(self) -> int:
        if len(self.shape) != IMAGE_AXES:
            raise UsageError(
                f"{self.name} takes images of channels x height x width, not samples of shape {self.shape}"
            )
        return self.shape[0]


def model(name: str, input_shape: Sequence[int], classes: int, seed: int = 0) -> nn.Module:
    """The model of this name with its first parameters. Its outputs are logits, unless the name says otherwise:

    `+probabilities` ends it with a softmax (FedFV's tables put cross entropy on top of one), `+zero-bias` starts all
    biases at zero, `+zero` all parameters.
    """
    base, *endings = name.split("+")
    kind, colon, numbers = base.partition(":")
    if kind not in MODELS or (colon and kind not in TAKE_NUMBERS) or not set(endings) <= ENDINGS.keys():
        raise UsageError(
            f"there is no model {name!r}; there are {', '.join(MODELS)}, and each may end with +{', +'.join(ENDINGS)}; "
            f"numbers after a colon are for {', '.join(TAKE_NUMBERS)}"
        )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        made = MODELS[kind](Wanted(kind, numbers if colon else None, tuple(input_shape), classes))
    for ending in endings:
        made = ENDINGS[ending](made)
    return made


def parameter_count(made: nn.Module) -> int:
    return sum(tensor.numel() for tensor in made.parameters())


def softmax(wanted: Wanted) -> nn.Module:
    """Multinomial logistic regression."""
    return nn.Sequential(nn.Flatten(), *_linear([_product(wanted.shape), wanted.classes]))


def mlp(wanted: Wanted) -> nn.Module:
    """Fully connected; hidden layers of the sizes given, each with a ReLU."""
    sizes = [_product(wanted.shape), *wanted.numbers([200, 200]), wanted.classes]
    return nn.Sequential(nn.Flatten(), *_linear(sizes))


def cnn_fedfv(wanted: Wanted) -> nn.Module:
    """Two 5 x 5 convolutions of 64 and three linear layers: the CNN for CIFAR-10 in FedFV's and FedLF's code."""
    channels = wanted.channels()
    return _classifier(wanted, [*_convolution(channels, 64, 5), *_convolution(64, 64, 5)], [384, 192])


def cnn_mcmahan(wanted: Wanted) -> nn.Module:
    """The CNN of the paper that introduced federated averaging."""
    channels = wanted.channels()
    return _classifier(wanted, [*_convolution(channels, 32, 5, 2), *_convolution(32, 64, 5, 2)], [512])


def cnn_leaf(wanted: Wanted) -> nn.Module:
    """LEAF's CNN for FEMNIST: McMahan's with a wider linear layer."""
    channels = wanted.channels()
    return _classifier(wanted, [*_convolution(channels, 32, 5, 2), *_convolution(32, 64, 5, 2)], [2048])


def vgg11(wanted: Wanted) -> nn.Module:
    """VGG configuration A with one linear layer, without batch normalisation; so deep, it needs He's initialisation."""
    layers: list[nn.Module] = []
    channels = wanted.channels()
    for width in (64, None, 128, None, 256, 256, None, 512, 512, None, 512, 512, None):
        if width is None:
            layers.append(nn.MaxPool2d(2))
        else:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
    made = _classifier(wanted, layers, [])
    for layer in layers:
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return made


def resnet18_gn(wanted: Wanted) -> nn.Module:
    """ResNet-18 for small images (no pooling at the start), with group instead of batch normalisation."""
    stem = [nn.Conv2d(wanted.channels(), 64, 3, padding=1, bias=False), nn.GroupNorm(GROUPS, 64), nn.ReLU()]
    blocks = [
        Residual(before, after, stride)
        for before, after, stride in [
            (64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1),
            (128, 256, 2), (256, 256, 1), (256, 512, 2), (512, 512, 1),
        ]
    ]  # fmt: skip
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, wanted.classes))


class Residual(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, padding=1, bias=False),
            nn.GroupNorm(GROUPS, after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
            nn.GroupNorm(GROUPS, after),
        )
        same = before == after and stride == 1
        self.shortcut = nn.Identity() if same else nn.Sequential(
            nn.Conv2d(before, after, 1, stride, bias=False), nn.GroupNorm(GROUPS, after)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def char_lstm(wanted: Wanted) -> nn.Module:
    """LEAF's model of the next character; `char-lstm:96` has a vocabulary that differs from the classes."""
    return CharacterLstm(wanted.numbers([wanted.classes])[0], wanted.classes)


class CharacterLstm(nn.Module):
    """Two layers of LSTM over embedded characters; what it says after the last one."""

    def __init__(self, vocabulary: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, EMBEDDING)
        self.lstm = nn.LSTM(EMBEDDING, HIDDEN, num_layers=2, batch_first=True)
        self.output = nn.Linear(HIDDEN, classes)

    def forward(self, characters: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(characters))
        said: Tensor = self.output(states[:, -1])
        return said


def _linear(sizes: Sequence[int]) -> list[nn.Module]:
    """Layers from each size to the next, with a ReLU between two."""
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return layers[:-1]


def _convolution(before: int, after: int, size: int, padding: int = 0) -> list[nn.Module]:
    return [nn.Conv2d(before, after, size, padding=padding), nn.ReLU(), nn.MaxPool2d(2)]


def _classifier(wanted: Wanted, encoder: Sequence[nn.Module], hidden: Sequence[int]) -> nn.Module:
    """The encoder, then linear layers on what it makes of an image."""
    try:
        with torch.no_grad():
            features = nn.Sequential(*encoder)(torch.zeros(1, *wanted.shape)).numel()
    except RuntimeError as error:
        raise UsageError(f"images of {wanted.shape} are too small for {wanted.name}: {error}") from error
    return nn.Sequential(*encoder, nn.Flatten(), *_linear([features, *hidden, wanted.classes]))


def _product(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())


def _with_probabilities(made: nn.Module) -> nn.Module:
    layers = made if isinstance(made, nn.Sequential) else [made]
    return nn.Sequential(*layers, nn.Softmax(dim=1))


def _with_zeros(*endings: str) -> Callable[[nn.Module], nn.Module]:
    def change(made: nn.Module) -> nn.Module:
        for name, tensor in made.named_parameters():
            if name.endswith(endings):
                nn.init.zeros_(tensor)
        return made

    return change


MODELS: dict[str, Callable[[Wanted], nn.Module]] = {
    "softmax": softmax,
    "mlp": mlp,
    "cnn-fedfv": cnn_fedfv,
    "cnn-mcmahan": cnn_mcmahan,
    "cnn-leaf": cnn_leaf,
    "vgg11": vgg11,
    "resnet18-gn": resnet18_gn,
    "char-lstm": char_lstm,
}
TAKE_NUMBERS = ("mlp", "char-lstm")
ENDINGS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "probabilities": _with_probabilities,
    "zero-bias": _with_zeros("bias"),
    "zero": _with_zeros(""),
}
