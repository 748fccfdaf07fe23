"""Recurrent models of the next character."""

from __future__ import annotations

from torch import Tensor, nn

from fairfleet.lab.models.request import ModelRequest

EMBEDDING, HIDDEN = 8, 256  # as in LEAF


def char_lstm(request: ModelRequest) -> nn.Module:
    """Build LEAF's model of the next character.

    `char-lstm:96` has a vocabulary of 96, which may differ from the number of classes.
    """
    return CharacterLstm(request.numbers([request.classes])[0], request.classes)


def char_lstm_1(request: ModelRequest) -> nn.Module:
    """Build the model of AdaFed's Table 4, setup 2: one LSTM layer, then a linear one.

    The paper gives no sizes; they are those of LEAF's model. `char-lstm-1:96` has a vocabulary of
    96.
    """
    return CharacterLstm(request.numbers([request.classes])[0], request.classes, layers=1)


class CharacterLstm(nn.Module):
    """LSTM layers over embedded characters; the output is that after the last character."""

    def __init__(self, vocabulary: int, classes: int, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, EMBEDDING)
        self.lstm = nn.LSTM(EMBEDDING, HIDDEN, num_layers=layers, batch_first=True)
        self.output = nn.Linear(HIDDEN, classes)

    def forward(self, characters: Tensor) -> Tensor:
        """Return the logits of the next character, with shape (samples, classes)."""
        states, _ = self.lstm(self.embedding(characters))
        logits: Tensor = self.output(states[:, -1])
        return logits
