"""AlexNet and VGG-11: a chain of convolutions, then dense layers, without shortcuts.

AlexNet (Krizhevsky, Sutskever and Hinton, 2012) has one column and no local response normalisation. VGG-11 (Simonyan
and Zisserman, 2015, configuration A) has a choice of normalisation. Initial weights: He normal before a ReLU, LeCun
normal in the output layer, biases zero.
"""

from __future__ import annotations

from collections.abc import Callable

from flax import linen as nn

from fedjax_async.base import check
from fedjax_async.base.factories import takes
from fedjax_async.models.blocks import VARIANTS, ConvNorm, Options, built, options, scaled
from fedjax_async.models.conv import Conv, he_normal, max_pool
from fedjax_async.models.wrap import check_shape, from_flax
from fedjax_async.types import Array, Model

# (channels, kernel, stride, padding, whether max-pooling follows)
ALEXNET = (
    (64, 11, 4, 5, True),
    (192, 5, 1, 2, True),
    (384, 3, 1, 1, False),
    (256, 3, 1, 1, False),
    (256, 3, 1, 1, True),
)


class AlexNet(nn.Module):
    """Five convolutions with ReLU, then dense layers ``hidden``, each after dropout, then the output layer."""

    num_classes: int
    hidden: tuple[int, ...] = ()
    window: int = 2  # side of the pools' windows; their stride is 2
    first_padding: int = 5
    width: float = 1.0
    lowering: str | None = None

    @nn.compact
    def __call__(self, x: Array, train: bool = False) -> Array:
        for n, (channels, kernel, stride, padding, pooled) in enumerate(ALEXNET, start=1):
            x = Conv(
                scaled(channels, self.width),
                kernel,
                stride,
                padding=self.first_padding if n == 1 else padding,
                # many channels on 4 x 4 pixels: im2col took 56 ms; tiled, the default for 5 x 5 on a CPU, took 129
                lowering=self.lowering or (None if n == 1 else "im2col"),
                kernel_init=he_normal,
                name=f"conv{n}",
            )(x)
            x = nn.relu(x)
            # images of 28 x 28 have one pixel left before the last pool
            fits = min(x.shape[1:3]) >= self.window
            x = max_pool(x, (self.window, self.window), (2, 2)) if pooled and fits else x
        x = x.reshape(x.shape[0], -1)
        for n, features in enumerate(self.hidden, start=1):
            x = nn.Dropout(0.5, deterministic=not train)(x)
            x = nn.relu(nn.Dense(features, kernel_init=he_normal, name=f"fc{n}")(x))
        return nn.Dense(self.num_classes, name="output")(x)


def alexnet(
    *,
    num_classes: int = 10,
    input_shape: tuple[int, int, int] = (32, 32, 3),
    variant: str = "small",
    width: float = 1.0,
    lowering: str | None = None,
) -> Model:
    """AlexNet: 2,472,266 parameters on 32 x 32 x 3, 2,456,778 on 28 x 28 x 1 (`variant`=small|full, `width`).

    conv 11x11x64 (stride 4), 5x5x192, 3x3x384, 3x3x256, 3x3x256; pools after the first, second and last.
    ``"small"``, the usual form for CIFAR-10, pads the first convolution by 5, pools 2 x 2 and has one dense layer:
    23,296 + 307,392 + 663,936 + 884,992 + 590,080 + 2,570. ``"full"`` is the network for 224 x 224: padding 2, pools of
    3 x 3 at stride 2, two dense layers of 4,096 with dropout 0.5, 61,100,840 parameters for 1,000 classes. It also
    takes images of 32 x 32, without its last pool: 20,344,650 parameters for 10 classes.
    """
    check.whole("num_classes", num_classes, 2)
    check_shape(input_shape, rank=3)
    options(norm="off", width=width, lowering=lowering)
    check.one_of("variant", variant, VARIANTS)
    full = variant == "full"
    enough = min(input_shape[:2]) >= 7
    check.require(enough or not full, "input_shape", input_shape, "at least 7 x 7 pixels for variant = full")
    net = AlexNet(num_classes, width=width, lowering=lowering)
    if full:
        net = net.clone(hidden=(scaled(4096, width),) * 2, window=3, first_padding=2)
    return from_flax(net, input_shape=input_shape)


# (channels, whether 2 x 2 max-pooling follows)
VGG11 = (
    (64, True),
    (128, True),
    (256, False),
    (256, True),
    (512, False),
    (512, True),
    (512, False),
    (512, True),
)


class VGG(nn.Module):
    """3 x 3 convolutions with ReLU, then dense layers ``hidden`` with dropout, then the output layer."""

    num_classes: int
    norm: Callable[..., nn.Module]
    hidden: tuple[int, ...] = ()
    width: float = 1.0
    lowering: str | None = None
    layers: tuple[tuple[int, bool], ...] = VGG11

    @nn.compact
    def __call__(self, x: Array, train: bool = False, mask: Array | None = None) -> Array:
        for n, (channels, pooled) in enumerate(self.layers, start=1):
            layer = ConvNorm(
                scaled(channels, self.width), self.norm, use_bias=True, lowering=self.lowering, name=f"conv{n}"
            )
            x = nn.relu(layer(x, train, mask))
            # images below 32 x 32 have one pixel left before the last pool
            x = max_pool(x) if pooled and min(x.shape[1:3]) > 1 else x
        x = x.reshape(x.shape[0], -1)
        for n, features in enumerate(self.hidden, start=1):
            x = nn.relu(nn.Dense(features, kernel_init=he_normal, name=f"fc{n}")(x))
            x = nn.Dropout(0.5, deterministic=not train)(x)
        return nn.Dense(self.num_classes, name="output")(x)


@takes(chosen=options)
def vgg11(*, num_classes: int = 10, input_shape: tuple[int, int, int] = (32, 32, 3), chosen: Options) -> Model:
    """VGG-11: 9,231,114 parameters on 32 x 32 x 3 (`norm`=batch|local|group|off, `variant`=small|full, `width`).

    Eight 3 x 3 convolutions of 64 to 512 channels. ``variant="small"`` ends in one dense layer (without normalisation
    9,225,610 parameters); ``"full"`` has two dense layers of 4,096 with dropout 0.5 before it: 132,868,840 with
    BatchNorm and 132,863,336 without, at 224 x 224 x 3 and 1,000 classes.
    """
    hidden = (scaled(4096, chosen.width),) * 2 if chosen.variant == "full" else ()
    net = VGG(num_classes, chosen.norm.layer, hidden, chosen.width, chosen.lowering)
    return built(net, chosen, num_classes, input_shape)
