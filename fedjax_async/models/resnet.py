"""ResNet-18 (He et al., 2016) for images and, with the same blocks, for sequences."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from flax import linen as nn

from fedjax_async.models.classic import ConvNorm, Options, built, global_mean, options, scaled
from fedjax_async.registry import takes
from fedjax_async.types import Array, Model

STAGES = (64, 128, 256, 512)  # channels; every stage after the first halves the resolution


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
    """A stem, stages of two blocks, the mean over all positions, the classes."""

    num_classes: int
    norm: Callable[..., nn.Module]
    variant: str = "small"
    width: float = 1.0
    lowering: str | None = None
    stages: tuple[int, ...] = STAGES

    @nn.compact
    def __call__(self, x: Array, train: bool = False, mask: Array | None = None) -> Array:
        layer = partial(
            ConvNorm, scaled(self.stages[0], self.width), self.norm, activation=nn.relu, lowering=self.lowering
        )
        if self.variant == "small":
            x = layer(name="stem")(x, train, mask)
        else:
            x = layer(kernel_size=7, strides=2, padding=3, name="stem")(x, train, mask)
            x = pool_by_two(x)
        for stage, channels in enumerate(self.stages, start=1):
            for n in (1, 2):
                strides = 2 if n == 1 and stage > 1 else 1
                block = Block(
                    scaled(channels, self.width), self.norm, strides, self.lowering, name=f"stage{stage}_block{n}"
                )
                x = block(x, train, mask)
        return nn.Dense(self.num_classes, name="output")(global_mean(x))


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
    return built(net, chosen.norm, num_classes, input_shape)


@takes(chosen=partial(options, variant="full"))
def resnet18_1d(*, num_classes: int = 6, input_shape: tuple[int, int] = (128, 6), chosen: Options) -> Model:
    """ResNet-18 over time: 3,849,222 parameters on 128 steps of 6 channels (`norm`, `variant`=full|small, `width`).

    The blocks of ``resnet18`` with kernels of 3 in place of 3 x 3; ``variant="full"`` starts with a kernel of 7 at
    stride 2 and max-pooling.
    """
    net = ResNet(num_classes, chosen.norm.layer, chosen.variant, chosen.width, chosen.lowering)
    return built(net, chosen.norm, num_classes, input_shape, axes=1)
