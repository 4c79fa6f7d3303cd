"""MobileNetV2 (Sandler et al., 2018): inverted residual blocks around depthwise convolutions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
from flax import linen as nn

from fedjax_async.base.factories import takes
from fedjax_async.models.blocks import ConvNorm, Options, built, global_mean, options, scaled
from fedjax_async.types import Array, Model

# (expansion, channels, blocks, stride of the first block): table 2 of the paper
STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))


class Inverted(nn.Module):
    """1 x 1 to ``hidden`` channels, 3 x 3 depthwise, 1 x 1 back to ``features``, beside a shortcut at stride 1.

    With ``small``, the first 1 x 1 convolution exists even if ``hidden`` is the width of the input, and a shortcut
    between different widths is a 1 x 1 convolution. The original has neither.
    """

    features: int
    hidden: int
    strides: int
    norm: Callable[..., nn.Module]
    small: bool
    activation: Callable[[Array], Array]
    lowering: str | None = None

    @nn.compact
    def __call__(self, x: Array, train: bool = False, mask: Array | None = None) -> Array:
        layer = partial(ConvNorm, norm=self.norm, lowering=self.lowering)
        point = partial(layer, kernel_size=1, padding=0)
        out = x
        if self.small or self.hidden != x.shape[-1]:
            out = point(self.hidden, activation=self.activation, name="widen")(out, train, mask)
        depthwise = layer(
            self.hidden, strides=self.strides, depthwise=True, activation=self.activation, name="depthwise"
        )
        out = point(self.features, name="narrow")(depthwise(out, train, mask), train, mask)
        if self.strides != 1:
            return out
        if x.shape[-1] == self.features:
            return out + x
        return out + point(self.features, name="shortcut")(x, train, mask) if self.small else out


class MobileNetV2(nn.Module):
    """A stem of 32 channels, stages of blocks, 1,280 channels, the mean over all positions, the output layer."""

    num_classes: int
    norm: Callable[..., nn.Module]
    variant: str = "small"
    width: float = 1.0
    lowering: str | None = None
    stages: tuple[tuple[int, int, int, int], ...] = STAGES

    @nn.compact
    def __call__(self, x: Array, train: bool = False, mask: Array | None = None) -> Array:
        small = self.variant == "small"
        activation = nn.relu if small else jax.nn.relu6
        layer = partial(ConvNorm, norm=self.norm, activation=activation, lowering=self.lowering)
        x = layer(scaled(32, self.width), strides=1 if small else 2, name="stem")(x, train, mask)
        for stage, (expansion, channels, blocks, stride) in enumerate(self.stages, start=1):
            for n in range(1, blocks + 1):
                # images of 32 x 32 are halved three times, not five
                strides = stride if n == 1 and not (small and stage == 2) else 1
                block = Inverted(
                    scaled(channels, self.width), expansion * x.shape[-1], strides, self.norm, small, activation,
                    self.lowering, name=f"stage{stage}_block{n}",
                )  # fmt: skip
                x = block(x, train, mask)
        x = layer(scaled(1280, self.width), kernel_size=1, padding=0, name="last")(x, train, mask)
        x = global_mean(x)
        x = x if small else nn.Dropout(0.2, deterministic=not train)(x)
        return nn.Dense(self.num_classes, name="output")(x)


@takes(chosen=options)
def mobilenetv2(*, num_classes: int = 100, input_shape: tuple[int, int, int] = (32, 32, 3), chosen: Options) -> Model:
    """MobileNetV2: 2,412,212 parameters on 32 x 32 x 3, 100 classes (`norm`, `variant`=small|full, `width`).

    ``variant="small"`` is the usual one for CIFAR (stem and second stage at stride 1, ReLU, shortcuts with a
    convolution where the width changes, no dropout), 2,296,922 parameters at 10 classes; ``"full"`` is the original
    (ReLU6, dropout 0.2), 3,504,872 at 1,000 classes.
    """
    net = MobileNetV2(num_classes, chosen.norm.layer, chosen.variant, chosen.width, chosen.lowering)
    return built(net, chosen, num_classes, input_shape)
