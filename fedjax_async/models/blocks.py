"""Parts of the larger image networks: their options and checks, and a convolution with normalisation.

``variant="small"`` is the usual form of a network for images of 32 x 32, ``"full"`` is the original for 224 x 224.
Padding is PyTorch's (one on either side of a 3 x 3 kernel, at stride 2 too), so that with the same weights the networks
equal the published ones. Initial weights: He normal before a ReLU, LeCun normal in the output layer, biases zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from flax import linen as nn

from fedjax_async.base import check
from fedjax_async.models.choice import check_lowering
from fedjax_async.models.conv import Conv, PerAxis, he_normal
from fedjax_async.models.lowerings import GROUPED
from fedjax_async.models.norm import Norm, normalisation
from fedjax_async.models.wrap import check_shape, from_flax
from fedjax_async.types import Array, Model

VARIANTS = ("small", "full")


class ConvNorm(nn.Module):
    """Convolution, normalisation and an optional activation."""

    features: int
    norm: Callable[..., nn.Module]
    kernel_size: PerAxis = 3
    strides: int = 1
    padding: int = 1
    use_bias: bool = False
    depthwise: bool = False
    activation: Callable[[Array], Array] | None = None
    lowering: str | None = None

    @nn.compact
    def __call__(self, x: Array, train: bool = False, mask: Array | None = None) -> Array:
        # a forced lowering is used for a depthwise convolution only if it can compute one
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
    """``width * channels``, rounded, at least one."""
    return max(1, round(channels * width))


def global_mean(x: Array) -> Array:
    """``[B, ..., C] -> [B, C]``."""
    return x.mean(axis=tuple(range(1, x.ndim - 1)))


class Options(NamedTuple):
    """The checked options that all these networks share; see :func:`options`."""

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
    """Check the shared options, except ``variant``, of which each network knows some.

    ``width``: a factor on all channels; ``lowering``: forces one for all convolutions.
    """
    check.positive("width", width)
    check_lowering(lowering)
    return Options(normalisation(norm, momentum=momentum, groups=groups), variant, width, lowering)


def built(
    net: nn.Module,
    chosen: Options,
    num_classes: int,
    input_shape: tuple[int, ...],
    *,
    axes: int = 2,
    variants: Sequence[str] = VARIANTS,
) -> Model:
    """The model of a network, after checks of variant and shapes; ``axes``: 2 for images, 1 for sequences."""
    check.one_of("variant", chosen.variant, variants)
    check.whole("num_classes", num_classes, 2)
    check_shape(input_shape, rank=axes + 1)
    return from_flax(net, input_shape=input_shape, private=chosen.norm.private)
