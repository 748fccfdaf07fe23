"""The models of the papers by name, such as `softmax`, `mlp:200,200`, `cnn-fedfv` and `vgg11`.

The first parameters of a model depend on its seed alone: the global random state is neither used
nor changed. No model has batch normalisation, because its running means belong to no client in
particular.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fairfleet.common.errors import UsageError

GROUPS = 32  # Groups of a group normalisation, as its authors recommend.
EMBEDDING, HIDDEN = 8, 256  # Sizes in the character model, as in LEAF.
IMAGE_AXES = 3


class ModelRequest(NamedTuple):
    """The description of the model to build."""

    name: str
    parameter: str | None  # The text after the colon in the name.
    shape: tuple[int, ...]  # The shape of one sample.
    classes: int

    def numbers(self, default: list[int]) -> list[int]:
        """Return the numbers after the colon, or `default`. Raises UsageError if one is below 1."""
        if self.parameter is None:
            return default
        parts = self.parameter.split(",")
        numbers = [int(part) if part.strip().isdecimal() else 0 for part in parts]
        if min(numbers) < 1:
            raise UsageError(
                f"{self.name} takes whole numbers from 1, as in {self.name}:200,200 "
                f"(found {self.parameter!r})"
            )
        return numbers

    def channels(self) -> int:
        """Return the number of channels. Raises UsageError if the samples are not images."""
        if len(self.shape) != IMAGE_AXES:
            raise UsageError(
                f"{self.name} takes images of channels x height x width, "
                f"not samples of shape {self.shape}"
            )
        return self.shape[0]


def model(name: str, input_shape: Sequence[int], classes: int, seed: int = 0) -> nn.Module:
    """Return the model of this name with its first parameters.

    Its outputs are logits, unless the name ends with `+probabilities`, which adds a softmax
    (FedFV's tables apply cross entropy to its output). `+zero-bias` starts all biases at zero, and
    `+zero` all parameters. Raises UsageError for an unknown name or samples that do not fit.
    """
    base, *endings = name.split("+")
    kind, colon, numbers = base.partition(":")
    is_known = kind in MODELS and set(endings) <= ENDINGS.keys()
    if not is_known or (colon and kind not in TAKE_NUMBERS):
        raise UsageError(
            f"there is no model {name!r}; there are {', '.join(MODELS)}, and each may end with "
            f"+{', +'.join(ENDINGS)}; numbers after a colon are for {', '.join(TAKE_NUMBERS)}"
        )
    request = ModelRequest(kind, numbers if colon else None, tuple(input_shape), classes)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        module = MODELS[kind](request)
    for ending in endings:
        module = ENDINGS[ending](module)
    return module


def softmax(request: ModelRequest) -> nn.Module:
    """Build multinomial logistic regression."""
    return nn.Sequential(nn.Flatten(), *_linear([_product(request.shape), request.classes]))


def mlp(request: ModelRequest) -> nn.Module:
    """Build fully connected layers, with hidden layers of the given sizes and ReLU."""
    sizes = [_product(request.shape), *request.numbers([200, 200]), request.classes]
    return nn.Sequential(nn.Flatten(), *_linear(sizes))


def cnn_fedfv(request: ModelRequest) -> nn.Module:
    """Build the CNN for CIFAR-10 in FedFV's and FedLF's code.

    It has two 5 x 5 convolutions of 64 channels and three linear layers.
    """
    channels = request.channels()
    return _classifier(
        request, [*_convolution(channels, 64, 5), *_convolution(64, 64, 5)], [384, 192]
    )


def cnn_mcmahan(request: ModelRequest) -> nn.Module:
    """Build the CNN of the paper that introduced federated averaging."""
    channels = request.channels()
    return _classifier(
        request, [*_convolution(channels, 32, 5, 2), *_convolution(32, 64, 5, 2)], [512]
    )


def cnn_leaf(request: ModelRequest) -> nn.Module:
    """Build LEAF's CNN for FEMNIST, which is McMahan's with a wider linear layer."""
    channels = request.channels()
    return _classifier(
        request, [*_convolution(channels, 32, 5, 2), *_convolution(32, 64, 5, 2)], [2048]
    )


def vgg11(request: ModelRequest) -> nn.Module:
    """Build VGG configuration A with one linear layer and without batch normalisation.

    A network of this depth needs He's initialisation.
    """
    layers: list[nn.Module] = []
    channels = request.channels()
    for width in (64, None, 128, None, 256, 256, None, 512, 512, None, 512, 512, None):
        if width is None:
            layers.append(nn.MaxPool2d(2))
        else:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
    module = _classifier(request, layers, [])
    for layer in layers:
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return module


def resnet18_gn(request: ModelRequest) -> nn.Module:
    """Build ResNet-18 for small images, with group instead of batch normalisation.

    Unlike the original, it has no pooling at the start.
    """
    stem = [
        nn.Conv2d(request.channels(), 64, 3, padding=1, bias=False),
        nn.GroupNorm(GROUPS, 64),
        nn.ReLU(),
    ]
    blocks = [
        ResidualBlock(before, after, stride)
        for before, after, stride in [
            (64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1),
            (128, 256, 2), (256, 256, 1), (256, 512, 2), (512, 512, 1),
        ]
    ]  # fmt: skip
    return nn.Sequential(
        *stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, request.classes)
    )


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions with a shortcut around them."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, padding=1, bias=False),
            nn.GroupNorm(GROUPS, after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
            nn.GroupNorm(GROUPS, after),
        )
        keeps_shape = before == after and stride == 1
        self.shortcut = nn.Identity() if keeps_shape else nn.Sequential(
            nn.Conv2d(before, after, 1, stride, bias=False), nn.GroupNorm(GROUPS, after)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the convolutions and the shortcut after a ReLU."""
        return torch.relu(self.body(x) + self.shortcut(x))


def char_lstm(request: ModelRequest) -> nn.Module:
    """Build LEAF's model of the next character.

    `char-lstm:96` has a vocabulary of 96, which may differ from the number of classes.
    """
    return CharacterLstm(request.numbers([request.classes])[0], request.classes)


class CharacterLstm(nn.Module):
    """Two LSTM layers over embedded characters; the output is that after the last character."""

    def __init__(self, vocabulary: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, EMBEDDING)
        self.lstm = nn.LSTM(EMBEDDING, HIDDEN, num_layers=2, batch_first=True)
        self.output = nn.Linear(HIDDEN, classes)

    def forward(self, characters: Tensor) -> Tensor:
        """Return the logits of the next character, with shape (samples, classes)."""
        states, _ = self.lstm(self.embedding(characters))
        logits: Tensor = self.output(states[:, -1])
        return logits


def _linear(sizes: Sequence[int]) -> list[nn.Module]:
    """Return linear layers from each size to the next, with a ReLU between two layers."""
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return layers[:-1]


def _convolution(before: int, after: int, size: int, padding: int = 0) -> list[nn.Module]:
    return [nn.Conv2d(before, after, size, padding=padding), nn.ReLU(), nn.MaxPool2d(2)]


def _classifier(
    request: ModelRequest, encoder: Sequence[nn.Module], hidden: Sequence[int]
) -> nn.Module:
    """Return the encoder followed by linear layers on its features."""
    try:
        with torch.no_grad():
            features = nn.Sequential(*encoder)(torch.zeros(1, *request.shape)).numel()
    except RuntimeError as error:
        raise UsageError(
            f"images of {request.shape} are too small for {request.name}: {error}"
        ) from error
    return nn.Sequential(*encoder, nn.Flatten(), *_linear([features, *hidden, request.classes]))


def _product(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())


def _with_probabilities(module: nn.Module) -> nn.Module:
    layers = module if isinstance(module, nn.Sequential) else [module]
    return nn.Sequential(*layers, nn.Softmax(dim=1))


def _with_zeros(*endings: str) -> Callable[[nn.Module], nn.Module]:
    """Return a function that zeroes the parameters whose names have one of these endings."""

    def _zero(module: nn.Module) -> nn.Module:
        for name, tensor in module.named_parameters():
            if name.endswith(endings):
                nn.init.zeros_(tensor)
        return module

    return _zero


MODELS: dict[str, Callable[[ModelRequest], nn.Module]] = {
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
