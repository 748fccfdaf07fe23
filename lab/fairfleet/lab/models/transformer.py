"""The compact convolutional transformer CCT-7/3x1 (Hassani et al., 2021), which FedLF uses.

One convolution turns an image into a sequence, seven encoder layers follow, and a learned mean
over the sequence gives the features.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from fairfleet.common.errors import UsageError
from fairfleet.lab.models.request import ModelRequest

WIDTH, HEADS, LAYERS, FEEDFORWARD = 256, 4, 7, 512
ATTENTION_DROPOUT = 0.1
STOCHASTIC_DEPTH = 0.1  # probability that the last layer's branches are left out of a sample


def cct(request: ModelRequest) -> nn.Module:
    """Build CCT-7/3x1 for images of any size."""
    convolution = nn.Conv2d(request.channels(), WIDTH, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(convolution.weight)
    tokenizer = nn.Sequential(convolution, nn.ReLU(), nn.MaxPool2d(3, 2, padding=1), nn.Flatten(2))
    try:
        with torch.no_grad():
            length = tokenizer(torch.zeros(1, *request.shape)).shape[2]
    except RuntimeError as error:
        raise UsageError(
            f"images of {request.shape} are too small for {request.name}: {error}"
        ) from error
    return CompactTransformer(tokenizer, length, request.classes)


class CompactTransformer(nn.Module):
    """A tokenizer, encoder layers, and pooling over the sequence."""

    def __init__(self, tokenizer: nn.Module, length: int, classes: int) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.position = nn.Parameter(nn.init.trunc_normal_(torch.empty(1, length, WIDTH), std=0.2))
        rates = torch.linspace(0, STOCHASTIC_DEPTH, LAYERS).tolist()
        self.layers = nn.Sequential(*(EncoderLayer(rate) for rate in rates))
        self.norm = nn.LayerNorm(WIDTH)
        self.pool = nn.Linear(WIDTH, 1)
        self.output = nn.Linear(WIDTH, classes)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits, with shape (samples, classes)."""
        x = self.tokenizer(images).transpose(1, 2) + self.position
        x = self.norm(self.layers(x))
        shares = torch.softmax(self.pool(x), 1)
        logits: Tensor = self.output((shares * x).sum(1))
        return logits


class EncoderLayer(nn.Module):
    """Attention between tokens, then a network of each token, both beside a shortcut."""

    def __init__(self, drop_rate: float) -> None:
        super().__init__()
        self.norm_before = nn.LayerNorm(WIDTH)
        self.queries_keys_values = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.norm_between = nn.LayerNorm(WIDTH)
        self.widen, self.narrow = nn.Linear(WIDTH, FEEDFORWARD), nn.Linear(FEEDFORWARD, WIDTH)
        self.drop_rate = drop_rate

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens of the same shape."""
        x = self.norm_between(x + self._drop(self._attention(self.norm_before(x))))
        return x + self._drop(self.narrow(functional.gelu(self.widen(x))))

    def _attention(self, x: Tensor) -> Tensor:
        samples, length, _ = x.shape
        parts = self.queries_keys_values(x).reshape(samples, length, 3, HEADS, WIDTH // HEADS)
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)
        scores = queries @ keys.transpose(-2, -1) * (WIDTH // HEADS) ** -0.5
        shares = functional.dropout(torch.softmax(scores, -1), ATTENTION_DROPOUT, self.training)
        mixed: Tensor = self.projection((shares @ values).transpose(1, 2).flatten(2))
        return mixed

    def _drop(self, branch: Tensor) -> Tensor:
        """Leave the branch out of some samples in training, and scale it in the others."""
        if not self.training or not self.drop_rate:
            return branch
        kept = torch.rand(len(branch), 1, 1, device=branch.device) >= self.drop_rate
        return branch * kept / (1 - self.drop_rate)
