"""Dense networks, many at a time: weights of m clients as one tensor [m, out, in], forward and backward by hand.

Autograd would keep a graph per step and a gradient as large as all the models; written out, a step of plain SGD is
one fused product per layer. Linear layers with ReLU between them and cross-entropy at the end, also after a softmax
that the model ends with (as FedFV's own do). `Perceptron.of` says whether a module is such a network.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fairfleet.common.tensors import Section, Signature


class Dense(NamedTuple):
    """A layer, and where its parameters are in the model's flat vector."""

    inputs: int
    outputs: int
    weight: slice
    bias: slice | None
    relu: bool  # follows it


@dataclass(frozen=True)
class Perceptron:
    layers: tuple[Dense, ...]
    softmax: bool  # the model's own, before the one inside the loss

    @classmethod
    def of(cls, module: nn.Module, signature: Signature) -> Perceptron | None:
        """The module's layers if it is a plain dense network, else None.

        Classes are compared exactly: a subclass, and so a layer with parametrised or normalised weights, may compute
        anything. A layer that occurs twice has fewer parameters than it would need, and one that is frozen is not ours.
        """
        parts = list(_parts(module, ""))
        softmax = bool(parts) and type(parts[-1][1]) is nn.Softmax
        if softmax and parts.pop()[1].dim not in (1, -1):
            return None
        if not all(tensor.requires_grad for tensor in module.parameters()):
            return None
        spans = {tensor.name: span for tensor, span in signature.spans(Section.PARAMETERS)}
        layers: list[Dense] = []
        for at, (prefix, part) in enumerate(parts):
            if type(part) is nn.Linear and f"{prefix}weight" in spans:
                follows = at + 1 < len(parts) and type(parts[at + 1][1]) is nn.ReLU
                bias = spans[f"{prefix}bias"] if part.bias is not None else None
                layers.append(Dense(part.in_features, part.out_features, spans[f"{prefix}weight"], bias, follows))
            elif not (type(part) is nn.ReLU and at and type(parts[at - 1][1]) is nn.Linear):
                return None
        made = cls(tuple(layers), softmax)
        whole = made.size == signature.size(Section.PARAMETERS) and not signature.size(Section.BUFFERS)
        return made if layers and whole and not layers[-1].relu else None

    @property
    def size(self) -> int:
        """How many parameters it has."""
        return sum(layer.inputs * layer.outputs + (layer.outputs if layer.bias else 0) for layer in self.layers)


def _parts(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """The steps of nested Sequentials, with what their parameters' names begin with; a first Flatten is left out."""
    if type(module) is nn.Sequential:
        for key, child in module._modules.items():  # named_children leaves out a module's second occurrence
            if child is not None and not _keeps_rows(child):
                yield from _parts(child, f"{prefix}{key}.")
    else:
        yield prefix, module


def _keeps_rows(part: nn.Module) -> bool:
    """Whether it does nothing to samples that are rows of numbers already."""
    return type(part) is nn.Identity or (type(part) is nn.Flatten and (part.start_dim, part.end_dim) == (1, -1))


@dataclass(frozen=True)
class Stack:
    """The weights of several copies of a network, layer by layer."""

    network: Perceptron
    weights: list[Tensor]  # [copies, outputs, inputs]
    biases: list[Tensor]  # [copies, 1, outputs]

    @classmethod
    def view(cls, network: Perceptron, flat: Tensor) -> Stack:
        """The one network that the flat vector is."""
        weights = [flat[layer.weight].view(1, layer.outputs, layer.inputs) for layer in network.layers]
        biases = [flat[layer.bias] if layer.bias else torch.zeros(layer.outputs) for layer in network.layers]
        return cls(network, weights, [bias.view(1, 1, -1) for bias in biases])

    def copies(self, count: int) -> Stack:
        """So many copies of the first, to be changed."""
        weights, biases = ([one[:1].repeat(count, 1, 1) for one in part] for part in (self.weights, self.biases))
        return Stack(self.network, weights, biases)

    def one(self, copy: int) -> Stack:
        weights, biases = ([one[copy : copy + 1] for one in part] for part in (self.weights, self.biases))
        return Stack(self.network, weights, biases)

    def forward(self, x: Tensor) -> list[Tensor]:
        """The input [copies, samples, features] and every layer's output; fewer inputs use the first copies."""
        outputs = [x]
        for layer, weight, bias in zip(self.network.layers, self.weights, self.biases, strict=True):
            out = torch.baddbmm(bias[: len(x)], outputs[-1], weight[: len(x)].transpose(1, 2))
            outputs.append(out.relu_() if layer.relu else out)
        return outputs

    def update(self, flat: Tensor, copy: int, row: Tensor) -> None:
        """Writes received - trained of one copy into a row as long as the model."""
        for layer, weight, bias in zip(self.network.layers, self.weights, self.biases, strict=True):
            torch.sub(flat[layer.weight], weight[copy].view(-1), out=row[layer.weight])
            if layer.bias:
                torch.sub(flat[layer.bias], bias[copy, 0], out=row[layer.bias])


class Judged(NamedTuple):
    """Per sample, [copies, samples]."""

    losses: Tensor
    right: Tensor


def judge(network: Perceptron, output: Tensor, y: Tensor) -> Judged:
    logs = torch.log_softmax(torch.softmax(output, 2) if network.softmax else output, 2)
    return Judged(-logs.gather(2, y[..., None])[..., 0], output.argmax(2) == y)


def blame(network: Perceptron, output: Tensor, y: Tensor, weight: Tensor | float) -> Tensor:
    """The gradient of the weighted sum of losses with respect to the last layer's output.

    `weight` [copies, samples, 1] is 1/n for each of a batch's n samples, and 0 where a shorter batch was filled up.
    """
    shares = torch.softmax(output, 2) if network.softmax else output
    error = torch.softmax(shares, 2)
    error.scatter_add_(2, y[..., None], torch.full((*y.shape, 1), -1.0, dtype=error.dtype))
    if network.softmax:
        error = shares * (error - (shares * error).sum(2, keepdim=True))
    return error.mul_(weight)


class LayerGradient(NamedTuple):
    """A layer's gradient as the product that it is: weight = error' input, bias = the sum of errors."""

    layer: int
    error: Tensor
    input: Tensor

    def weight(self) -> Tensor:
        return torch.bmm(self.error.transpose(1, 2), self.input)

    def bias(self) -> Tensor:
        return self.error.sum(1, keepdim=True)


def backward(stack: Stack, outputs: list[Tensor], error: Tensor) -> Iterator[LayerGradient]:
    """From the last layer to the first. A layer's weights may be changed once its gradient was yielded."""
    for at in reversed(range(len(stack.weights))):
        before = torch.bmm(error, stack.weights[at][: len(error)]) if at else None
        yield LayerGradient(at, error, outputs[at])
        if before is not None:
            error = before.mul_(outputs[at] > 0) if stack.network.layers[at - 1].relu else before
