"""Networks of the package written with ``torch.nn``, as a user would write them; ``names``: our layers -> theirs."""

import torch
from torch import nn


def sequential(layers, names):
    net = nn.Sequential(*layers)
    net.names = names
    return net


def conv_of(params, name, **options):
    """A convolution of the size of the params."""
    layer = params[name].get("conv", params[name])
    height, width, channels, features = layer["kernel"].shape
    return nn.Conv2d(channels, features, (height, width), **options)


def linear_of(params, name):
    return nn.Linear(*params[name]["kernel"].shape)


def cnn(params):
    layers = [conv_of(params, "conv1"), nn.ReLU(), conv_of(params, "conv2"), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    layers += [linear_of(params, "fc1"), nn.ReLU(), nn.Dropout(), linear_of(params, "output")]
    return sequential(layers, {"conv1": "0", "conv2": "2", "fc1": "6", "output": "9"})


def alexnet(params):
    """``variant=full`` on images of 32 x 32; one pixel is left before the last pool."""
    shapes = {1: (4, 2, True), 2: (1, 2, True), 3: (1, 1, False), 4: (1, 1, False), 5: (1, 1, False)}
    layers, names = [], {}
    for n, (stride, padding, pooled) in shapes.items():
        names[f"conv{n}"] = str(len(layers))
        layers += [conv_of(params, f"conv{n}", stride=stride, padding=padding), nn.ReLU()]
        layers += [nn.MaxPool2d(3, 2)] if pooled else []
    layers.append(nn.Flatten())
    for n in (1, 2):
        names[f"fc{n}"] = str(len(layers) + 1)
        layers += [nn.Dropout(), linear_of(params, f"fc{n}"), nn.ReLU()]
    return sequential([*layers, linear_of(params, "output")], names | {"output": str(len(layers))})


class ConvNorm(nn.Module):
    """Convolution and normalisation under our names."""

    def __init__(self, params, name):
        super().__init__()
        self.conv = conv_of(params, name, padding=1)
        self.norm = nn.BatchNorm2d(self.conv.out_channels)

    def forward(self, x):
        return torch.relu(self.norm(self.conv(x)))


def vgg11(params):
    params = params["params"]
    layers, names = [], {}
    for n, pooled in enumerate((True, True, False, True, False, True, False, True), start=1):
        names[f"conv{n}"] = str(len(layers))
        layers += [ConvNorm(params, f"conv{n}"), *([nn.MaxPool2d(2)] if pooled else [])]
    layers.append(nn.Flatten())
    for n in range(1, sum(name.startswith("fc") for name in params) + 1):
        names[f"fc{n}"] = str(len(layers))
        layers += [linear_of(params, f"fc{n}"), nn.ReLU(), nn.Dropout()]
    return sequential([*layers, linear_of(params, "output")], names | {"output": str(len(layers))})


NETWORKS = {"cnn": cnn, "alexnet": alexnet, "vgg11": vgg11}
