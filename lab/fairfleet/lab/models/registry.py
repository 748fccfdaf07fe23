"""Models by name, their first parameters from a seed, and the endings of a name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from fairfleet.common.errors import UsageError
from fairfleet.lab.models.characters import char_lstm, char_lstm_1
from fairfleet.lab.models.convolutional import (
    cnn_dropout,
    cnn_fedfv,
    cnn_fedmgda,
    cnn_femnist,
    cnn_leaf,
    cnn_mcmahan,
    vgg11,
)
from fairfleet.lab.models.dense import mlp, softmax
from fairfleet.lab.models.normaliser_free import nfresnet18, nfresnet18_fedlf
from fairfleet.lab.models.request import ModelRequest
from fairfleet.lab.models.residual import resnet18_gn
from fairfleet.lab.models.transformer import cct


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
    "cnn-fedmgda": cnn_fedmgda,
    "cnn-dropout": cnn_dropout,
    "cnn-femnist": cnn_femnist,
    "vgg11": vgg11,
    "resnet18-gn": resnet18_gn,
    "nfresnet18": nfresnet18,
    "nfresnet18-fedlf": nfresnet18_fedlf,
    "cct": cct,
    "char-lstm": char_lstm,
    "char-lstm-1": char_lstm_1,
}
TAKE_NUMBERS = ("mlp", "char-lstm", "char-lstm-1")
ENDINGS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "probabilities": _with_probabilities,
    "zero-bias": _with_zeros("bias"),
    "zero": _with_zeros(""),
}
