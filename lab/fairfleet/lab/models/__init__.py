"""The models of the papers by name, such as `softmax`, `mlp:200,200`, `cnn-fedfv` and `vgg11`.

The first parameters of a model depend on its seed alone: the global random state is neither used
nor changed. No model has batch normalisation, because its running means belong to no client in
particular.
"""

from fairfleet.lab.models.characters import CharacterLstm, char_lstm, char_lstm_1
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
from fairfleet.lab.models.registry import ENDINGS, MODELS, TAKE_NUMBERS, model
from fairfleet.lab.models.request import ModelRequest
from fairfleet.lab.models.residual import ResidualBlock, resnet18_gn
from fairfleet.lab.models.transformer import cct

__all__ = [
    "ENDINGS",
    "MODELS",
    "TAKE_NUMBERS",
    "CharacterLstm",
    "ModelRequest",
    "ResidualBlock",
    "cct",
    "char_lstm",
    "char_lstm_1",
    "cnn_dropout",
    "cnn_fedfv",
    "cnn_fedmgda",
    "cnn_femnist",
    "cnn_leaf",
    "cnn_mcmahan",
    "mlp",
    "model",
    "nfresnet18",
    "nfresnet18_fedlf",
    "resnet18_gn",
    "softmax",
    "vgg11",
]
