"""Convolutional networks without shortcuts, with the sizes that the papers print.

No convolution is followed by batch normalisation.
"""

from __future__ import annotations

from torch import nn

from fairfleet.lab.models.request import ModelRequest, classifier, convolution


def cnn_fedfv(request: ModelRequest) -> nn.Module:
    """Build the CNN for CIFAR-10 in FedFV's and FedLF's code.

    It has two 5 x 5 convolutions of 64 channels and three linear layers.
    """
    channels = request.channels()
    return classifier(request, [*convolution(channels, 64, 5), *convolution(64, 64, 5)], [384, 192])


def cnn_mcmahan(request: ModelRequest) -> nn.Module:
    """Build the CNN of the paper that introduced federated averaging."""
    channels = request.channels()
    return classifier(
        request, [*convolution(channels, 32, 5, 2), *convolution(32, 64, 5, 2)], [512]
    )


def cnn_leaf(request: ModelRequest) -> nn.Module:
    """Build LEAF's CNN for FEMNIST, which is McMahan's with a wider linear layer."""
    channels = request.channels()
    return classifier(
        request, [*convolution(channels, 32, 5, 2), *convolution(32, 64, 5, 2)], [2048]
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
    module = classifier(request, layers, [])
    for layer in layers:
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return module


def cnn_fedmgda(request: ModelRequest) -> nn.Module:
    """Build the CNN for CIFAR-10 of FedMGDA+ (Table 2).

    It is FedFV's with local response normalisation: after the first pooling, and before the second.
    """
    first, second = convolution(request.channels(), 64, 5), convolution(64, 64, 5)
    normalised = [
        *first,
        nn.LocalResponseNorm(2),
        *second[:-1],
        nn.LocalResponseNorm(2),
        second[-1],
    ]
    return classifier(request, normalised, [384, 192])


def cnn_dropout(request: ModelRequest) -> nn.Module:
    """Build the small CNN for Fashion-MNIST of FedMGDA+ (Table 3), with dropout."""
    encoder = [
        *convolution(request.channels(), 10, 5),
        *convolution(10, 20, 5),
        nn.Dropout2d(0.5),
    ]
    return classifier(request, encoder, [50], dropout=0.5)


def cnn_femnist(request: ModelRequest) -> nn.Module:
    """Build the CNN for FEMNIST of FedMGDA+ (Table 4), which is that of Reddi et al. (2020).

    The table prints a ReLU after the second convolution only. Here it follows every layer but the
    last, as in the code of Reddi et al.
    """
    encoder = [
        nn.Conv2d(request.channels(), 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
    ]
    return classifier(request, encoder, [128], dropout=0.5)
