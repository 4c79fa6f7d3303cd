"""ResNet-18 (He et al., 2016) for images and, with the same blocks, for sequences."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from flax import linen as nn

from fedjax_async.base.factories import takes
from fedjax_async.models.blocks import ConvNorm, Options, built, global_mean, options, scaled
from fedjax_async.models.conv import Conv, he_normal
from fedjax_async.types import Array, Model

STAGES = (64, 128, 256, 512)  # channels; every stage after the first halves the resolution


class Variant(NamedTuple):
    """The parts of a variant of the network around its blocks."""

    stem: tuple[int, int, int] = (3, 1, 1)  # kernel, stride, padding
    pooled: bool = False  # whether max-pooling follows the stem
    width: float = 1.0  # a factor on the channels of all stages
    joined: bool = False  # whether a convolution before a stage changes the shape, instead of the stage's first block
    parts: int = 1  # of the positions; the mean is taken over each part
    use_bias: bool = True  # in the output layer


RESNETS = {
    "small": Variant(),
    "full": Variant((7, 2, 3), pooled=True),
    "orthofl": Variant((7, 3, 0), width=0.5, joined=True, parts=2, use_bias=False),
}


class Block(nn.Module):
    """Two 3-wide convolutions beside a shortcut, which is a 1-wide convolution where the shape changes."""

    features: int
    norm: Callable[..., nn.Module]
    strides: int = 1
    lowering: str | None = None

    @nn.compact
    def __call__(self, x: Array, train: bool = False, mask: Array | None = None) -> Array:
        layer = partial(ConvNorm, self.features, self.norm, lowering=self.lowering)
        out = layer(strides=self.strides, activation=nn.relu, name="conv1")(x, train, mask)
        out = layer(name="conv2")(out, train, mask)
        if self.strides != 1 or x.shape[-1] != self.features:
            x = layer(kernel_size=1, padding=0, strides=self.strides, name="shortcut")(x, train, mask)
        return nn.relu(out + x)


class ResNet(nn.Module):
    """A stem, stages of two blocks, the mean over all positions (or over each part of them), the output layer."""

    num_classes: int
    norm: Callable[..., nn.Module]
    variant: str = "small"
    width: float = 1.0
    lowering: str | None = None
    stages: tuple[int, ...] = STAGES

    @nn.compact
    def __call__(self, x: Array, train: bool = False, mask: Array | None = None) -> Array:
        design = RESNETS[self.variant]
        widths = [scaled(channels, design.width * self.width) for channels in self.stages]
        layer = partial(ConvNorm, widths[0], self.norm, *design.stem, activation=nn.relu, lowering=self.lowering)
        x = layer(name="stem")(x, train, mask)
        x = pool_by_two(x) if design.pooled else x
        for stage, features in enumerate(widths, start=1):
            strides = 2 if stage > 1 else 1
            if design.joined and strides == 2:
                join = partial(Conv, features, 3, 2, padding=1, use_bias=False, lowering=self.lowering)
                x = nn.relu(join(kernel_init=he_normal, name=f"stage{stage}_join")(x))
                strides = 1
            for n in (1, 2):
                name = f"stage{stage}_block{n}"
                x = Block(features, self.norm, strides if n == 1 else 1, self.lowering, name=name)(x, train, mask)
        return nn.Dense(self.num_classes, design.use_bias, name="output")(part_means(x, design.parts))


def part_means(x: Array, parts: int) -> Array:
    """The means over ``parts`` parts of the first axis of positions: ``[B, L, ..., C] -> [B, parts * C]``.

    Part i, from 0, has the positions from ``floor(i L / parts)`` up to ``ceil((i + 1) L / parts)``. Neighbouring parts
    share a position if L is not a multiple of ``parts``.
    """
    if parts == 1:
        return global_mean(x)
    length = x.shape[1]
    ends = [(i * length // parts, -(-(i + 1) * length // parts)) for i in range(parts)]
    return jnp.concatenate([global_mean(x[:, first:last]) for first, last in ends], axis=-1)


def pool_by_two(x: Array) -> Array:
    """Maximum over windows of 3 at stride 2, padded by one, along every axis between batch and channels."""
    axes = x.ndim - 2
    return nn.max_pool(x, (3,) * axes, (2,) * axes, ((1, 1),) * axes)


@takes(chosen=options)
def resnet18(*, num_classes: int = 10, input_shape: tuple[int, int, int] = (32, 32, 3), chosen: Options) -> Model:
    """ResNet-18: 11,173,962 parameters on 32 x 32 x 3 (`norm`=batch|local|group|off, `variant`=small|full, `width`).

    ``variant="small"`` starts with a 3 x 3 convolution at stride 1, ``"full"`` with 7 x 7 at stride 2 and max-pooling
    (11,689,512 parameters at 1,000 classes).
    """
    net = ResNet(num_classes, chosen.norm.layer, chosen.variant, chosen.width, chosen.lowering)
    return built(net, chosen, num_classes, input_shape)


@takes(chosen=partial(options, variant="full"))
def resnet18_1d(*, num_classes: int = 6, input_shape: tuple[int, int] = (128, 6), chosen: Options) -> Model:
    """ResNet-18 over time: 3,849,222 parameters on 128 steps of 6 channels (`variant`=full|small|orthofl, `norm`).

    The blocks of ``resnet18`` with kernels of 3 in place of 3 x 3; ``variant="full"`` starts with a kernel of 7 at
    stride 2 and max-pooling. ``width`` is a factor on all channels.

    ``variant="orthofl"`` is the network that OrthoFL's authors released for HAR: 1,182,496 trained parameters on 128
    steps of 9 channels (the paper's table says 119K, probably for 1.19M). The stem has a kernel of 7 at stride 3
    without padding and 32 channels. Four stages of two blocks have 32, 64, 128 and 256 channels; all shortcuts are the
    identity. A convolution of 3 at stride 2 with ReLU and without normalisation precedes each stage but the first. The
    output layer reads the means over the first and over the second half of the time. Convolutions and output have no
    bias, and there is no dropout. Parameters: 2,016 + 64 for the stem, ``2 (6 c^2 + 4 c)`` for a stage of c channels,
    129,024 for the convolutions between the stages, 3,072 for the output. Source: the code released with OrthoFL
    (2025). Deviation: initial weights are He normal (output: LeCun normal), not PyTorch's uniform ones, which are
    sqrt(6) (output: sqrt(3)) times smaller.
    """
    net = ResNet(num_classes, chosen.norm.layer, chosen.variant, chosen.width, chosen.lowering)
    return built(net, chosen, num_classes, input_shape, axes=1, variants=tuple(RESNETS))
