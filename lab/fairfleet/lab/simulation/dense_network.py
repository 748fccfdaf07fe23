"""Dense networks of many clients at a time, with forward and backward passes written by hand.

The weights of m clients are one tensor [m, out, in]. Autograd would keep a graph per step and a
gradient as large as all the models; written out, a step of plain SGD is one fused product per
layer. The networks are linear layers with ReLU between them and cross-entropy at the end, also
after a softmax at the end of the model (as in FedFV's models). `DenseNetwork.of` recognizes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fairfleet.common.tensors import Section, Signature

Part = tuple[str, nn.Module]  # the prefix of its parameters' names, and the module


class DenseLayer(NamedTuple):
    """A linear layer, and the spans of its parameters in the model's flat vector."""

    inputs: int
    outputs: int
    weight: slice
    bias: slice | None
    relu: bool  # a ReLU follows


@dataclass(frozen=True)
class DenseNetwork:
    """The layers of a plain dense network."""

    layers: tuple[DenseLayer, ...]
    softmax: bool  # the model has its own softmax, before the one inside the loss

    @classmethod
    def of(cls, module: nn.Module, signature: Signature) -> DenseNetwork | None:
        """Return the network of a module, or None if the module is no plain dense network.

        Classes are compared exactly: a subclass, for example a layer with parametrized or
        normalized weights, may compute anything. A layer that occurs twice has fewer parameters
        than its two occurrences need, and one with frozen weights is not supported.
        """
        parts = list(_parts(module, ""))
        softmax = bool(parts) and type(parts[-1][1]) is nn.Softmax
        if softmax and parts.pop()[1].dim not in (1, -1):
            return None
        if not all(tensor.requires_grad for tensor in module.parameters()):
            return None
        layers = _layers(parts, signature)
        if not layers or layers[-1].relu:
            return None
        network = cls(tuple(layers), softmax)
        has_all = network.size == signature.size(Section.PARAMETERS)
        return network if has_all and not signature.size(Section.BUFFERS) else None

    @property
    def size(self) -> int:
        """The number of parameters."""
        return sum(
            layer.inputs * layer.outputs + (layer.outputs if layer.bias else 0)
            for layer in self.layers
        )


def _layers(parts: list[Part], signature: Signature) -> list[DenseLayer] | None:
    """Return the linear layers, or None if there is anything but these and ReLUs after them."""
    spans = {tensor.name: span for tensor, span in signature.spans(Section.PARAMETERS)}
    layers: list[DenseLayer] = []
    for index, (prefix, part) in enumerate(parts):
        if type(part) is nn.Linear and f"{prefix}weight" in spans:
            relu = index + 1 < len(parts) and type(parts[index + 1][1]) is nn.ReLU
            bias = spans[f"{prefix}bias"] if part.bias is not None else None
            weight = spans[f"{prefix}weight"]
            layers.append(DenseLayer(part.in_features, part.out_features, weight, bias, relu))
        elif not (type(part) is nn.ReLU and index and type(parts[index - 1][1]) is nn.Linear):
            return None
    return layers


def _parts(module: nn.Module, prefix: str) -> Iterator[Part]:
    """Yield the modules of nested Sequentials, without those that leave flat samples unchanged."""
    if type(module) is nn.Sequential:
        # `named_children` would leave out the second occurrence of a module.
        for key, child in module._modules.items():
            if child is not None and not _keeps_rows(child):
                yield from _parts(child, f"{prefix}{key}.")
    else:
        yield prefix, module


def _keeps_rows(part: nn.Module) -> bool:
    """Return whether the module leaves samples unchanged that are flat vectors."""
    return type(part) is nn.Identity or (
        type(part) is nn.Flatten and (part.start_dim, part.end_dim) == (1, -1)
    )


@dataclass(frozen=True)
class StackedWeights:
    """The weights of several copies of a network, layer by layer."""

    network: DenseNetwork
    weights: list[Tensor]  # [copies, outputs, inputs]
    biases: list[Tensor]  # [copies, 1, outputs]

    @classmethod
    def view(cls, network: DenseNetwork, flat: Tensor) -> StackedWeights:
        """Return a stack of the single network whose parameters are the flat vector."""
        weights = [
            flat[layer.weight].view(1, layer.outputs, layer.inputs) for layer in network.layers
        ]
        biases = [
            flat[layer.bias] if layer.bias else torch.zeros(layer.outputs)
            for layer in network.layers
        ]
        return cls(network, weights, [bias.view(1, 1, -1) for bias in biases])

    def copies(self, count: int) -> StackedWeights:
        """Return a stack of `count` copies of the first network, with memory of its own."""
        return StackedWeights(
            self.network,
            [weight[:1].repeat(count, 1, 1) for weight in self.weights],
            [bias[:1].repeat(count, 1, 1) for bias in self.biases],
        )

    def single(self, copy: int) -> StackedWeights:
        """Return a view of one copy."""
        return StackedWeights(
            self.network,
            [weight[copy : copy + 1] for weight in self.weights],
            [bias[copy : copy + 1] for bias in self.biases],
        )

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return the input [copies, samples, features] and the output of every layer.

        An input for fewer copies uses the first ones.
        """
        outputs = [x]
        for layer, weight, bias in zip(self.network.layers, self.weights, self.biases, strict=True):
            out = torch.baddbmm(bias[: len(x)], outputs[-1], weight[: len(x)].transpose(1, 2))
            outputs.append(out.relu_() if layer.relu else out)
        return outputs

    def write_update(self, flat: Tensor, copy: int, row: Tensor) -> None:
        """Write the update (received - trained) of one copy into a row as long as the model."""
        for layer, weight, bias in zip(self.network.layers, self.weights, self.biases, strict=True):
            torch.sub(flat[layer.weight], weight[copy].view(-1), out=row[layer.weight])
            if layer.bias:
                torch.sub(flat[layer.bias], bias[copy, 0], out=row[layer.bias])


class SampleScores(NamedTuple):
    """Loss and correctness per sample, [copies, samples]."""

    losses: Tensor
    right: Tensor


def sample_losses(network: DenseNetwork, output: Tensor, y: Tensor) -> SampleScores:
    """Return the cross-entropy of each sample, and whether its class was predicted."""
    logs = torch.log_softmax(torch.softmax(output, 2) if network.softmax else output, 2)
    return SampleScores(-logs.gather(2, y[..., None])[..., 0], output.argmax(2) == y)


def output_gradient(
    network: DenseNetwork, output: Tensor, y: Tensor, weight: Tensor | float
) -> Tensor:
    """Return the gradient of the weighted sum of losses with respect to the last layer's output.

    `weight` [copies, samples, 1] is 1/n for each of a batch's n samples, and 0 for the samples
    that fill up a shorter batch.
    """
    shares = torch.softmax(output, 2) if network.softmax else output
    error = torch.softmax(shares, 2)
    error.scatter_add_(2, y[..., None], torch.full((*y.shape, 1), -1.0, dtype=error.dtype))
    if network.softmax:
        error = shares * (error - (shares * error).sum(2, keepdim=True))
    return error.mul_(weight)


class LayerGradient(NamedTuple):
    """The gradient of a layer in factors: weight = error' input, bias = sum of the errors."""

    layer: int
    error: Tensor
    input: Tensor

    def weight(self) -> Tensor:
        """Return the gradient of the weights."""
        return torch.bmm(self.error.transpose(1, 2), self.input)

    def bias(self) -> Tensor:
        """Return the gradient of the biases."""
        return self.error.sum(1, keepdim=True)


def backward(
    stack: StackedWeights, outputs: list[Tensor], error: Tensor
) -> Iterator[LayerGradient]:
    """Yield the gradients from the last layer to the first.

    The weights of a layer may be changed once its gradient was yielded.
    """
    for layer in reversed(range(len(stack.weights))):
        before = torch.bmm(error, stack.weights[layer][: len(error)]) if layer else None
        yield LayerGradient(layer, error, outputs[layer])
        if before is not None:
            relu = stack.network.layers[layer - 1].relu
            error = before.mul_(outputs[layer] > 0) if relu else before
