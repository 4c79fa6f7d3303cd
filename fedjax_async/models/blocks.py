"""What the larger image networks share: their two variants, checks, and the layers that take a mask.

``variant="small"`` is the network as it is usually cut for images of 32 x 32, ``"full"`` the original for 224 x 224.
Padding is PyTorch's (one on either side of a 3 x 3 kernel, at stride 2 too), so that the networks equal the published
ones given the same weights. Initial weights: He normal before a ReLU, LeCun normal in the output layer, biases zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from flax import linen as nn

from fedjax_async import check, registry
from fedjax_async.models.conv import Conv, Sizes, he_normal
from fedjax_async.models.lowerings import GROUPED, LOWERINGS
from fedjax_async.models.norm import Norm, normalisation
from fedjax_async.models.wrap import check_shape, from_flax
from fedjax_async.types import Array, Model

VARIANTS = ("small", "full")


class ConvNorm(nn.Module):
    """Convolution, normalisation and, if given, an activation."""

    features: int
    norm: Callable[..., nn.Module]
    kernel_size: Sizes = 3
    strides: int = 1
    padding: int = 1
    use_bias: bool = False
    depthwise: bool = False
    activation: Callable[[Array], Array] | None = None
    lowering: str | None = None

    @nn.compact
    def __call__(self, x: Array, train: bool = False, mask: Array | None = None) -> Array:
        # a forced lowering is for the convolutions that multiply matrices
        lowering = self.lowering if not self.depthwise or self.lowering in GROUPED else None
        x = Conv(
            self.features,
            self.kernel_size,
            self.strides,
            padding=self.padding,
            use_bias=self.use_bias,
            feature_group_count=self.features if self.depthwise else 1,
            lowering=lowering,
            kernel_init=he_normal,
            name="conv",
        )(x)
        x = self.norm(name="norm")(x, train, mask)
        return x if self.activation is None else self.activation(x)


def scaled(channels: int, width: float) -> int:
    """``width`` times so many channels, at least one."""
    return max(1, round(channels * width))


def global_mean(x: Array) -> Array:
    """``[B, ..., C] -> [B, C]``."""
    return x.mean(axis=tuple(range(1, x.ndim - 1)))


class Options(NamedTuple):
    """What all these networks may be told, as :func:`options` has checked it."""

    norm: Norm
    variant: str
    width: float
    lowering: str | None


def options(
    *,
    norm: str = "batch",
    variant: str = "small",
    width: float = 1.0,
    momentum: float | None = None,
    groups: int | None = None,
    lowering: str | None = None,
) -> Options:
    """The normalisation with its own options, the variant, a factor on all channels, and a forced lowering."""
    check.positive("width", width)
    check.one_of("variant", variant, VARIANTS)
    if lowering is not None:
        registry.find("lowering", LOWERINGS, lowering)
    return Options(normalisation(norm, momentum=momentum, groups=groups), variant, width, lowering)


def built(net: nn.Module, norm: Norm, num_classes: int, input_shape: tuple[int, ...], *, axes: int = 2) -> Model:
    """The model of a network with so many spatial ``axes``, after checks of the data's shape."""
    check.whole("num_classes", num_classes, 2)
    check_shape(input_shape, rank=axes + 1)
    return from_flax(net, input_shape=input_shape, private=norm.private)
