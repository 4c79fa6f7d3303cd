"""VGG-11 (Simonyan and Zisserman, 2015, configuration A), with or without normalisation."""

from __future__ import annotations

from collections.abc import Callable

from flax import linen as nn

from fedjax_async.models.classic import ConvNorm, Options, built, options, scaled
from fedjax_async.models.conv import he_normal, max_pool
from fedjax_async.registry import takes
from fedjax_async.types import Array, Model

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
    """3 x 3 convolutions with ReLU, then dense layers ``hidden`` with dropout, then the classes."""

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
            # images below 32 x 32 are one pixel already before the last pool
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
    hidden = {"small": (), "full": (scaled(4096, chosen.width),) * 2}[chosen.variant]
    net = VGG(num_classes, chosen.norm.layer, hidden, chosen.width, chosen.lowering)
    return built(net, chosen.norm, num_classes, input_shape)
