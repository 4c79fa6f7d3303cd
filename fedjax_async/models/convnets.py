"""The convolutional networks of the papers that are reproduced here.

Initial weights: He normal before a ReLU, LeCun normal in the output layer, biases zero. ``lowering`` forces one of
``lowerings.LOWERINGS`` for every convolution; ``None`` chooses by backend and shape.
"""

from __future__ import annotations

from flax import linen as nn

from fedjax_async import check, registry
from fedjax_async.models.conv import Conv, ConvPool, he_normal
from fedjax_async.models.lowerings import LOWERINGS
from fedjax_async.models.wrap import check_shape, from_flax
from fedjax_async.types import Array, Model

Shape = tuple[int, int, int]


class LeNet(nn.Module):
    """Two 5 x 5 convolutions, each with ReLU and 2 x 2 pooling, then dense layers 120, 84, ``num_classes``."""

    num_classes: int
    channels: tuple[int, int] = (6, 16)
    paddings: tuple[str, str] = ("VALID", "VALID")
    pool: str = "max"
    use_bias: bool = True
    lowering: str | None = None

    @nn.compact
    def __call__(self, x: Array) -> Array:
        for n, (features, padding) in enumerate(zip(self.channels, self.paddings), start=1):
            block = ConvPool(features, 5, padding, self.pool, self.use_bias, self.lowering, name=f"conv{n}")
            x = block(x)
        x = x.reshape(x.shape[0], -1)
        for n, width in enumerate((120, 84), start=1):
            x = nn.relu(nn.Dense(width, self.use_bias, kernel_init=he_normal, name=f"fc{n}")(x))
        return nn.Dense(self.num_classes, self.use_bias, name="output")(x)


class CNN(nn.Module):
    """Two 3 x 3 convolutions, one pool, one dense layer; dropout after the pool and after the dense layer."""

    num_classes: int
    lowering: str | None = None

    @nn.compact
    def __call__(self, x: Array, train: bool = False) -> Array:
        first = Conv(32, 3, padding="VALID", lowering=self.lowering, kernel_init=he_normal, name="conv1")
        x = ConvPool(64, 3, "VALID", lowering=self.lowering, name="conv2")(nn.relu(first(x)))
        x = nn.Dropout(0.25, deterministic=not train)(x)
        x = nn.relu(nn.Dense(128, kernel_init=he_normal, name="fc1")(x.reshape(x.shape[0], -1)))
        x = nn.Dropout(0.5, deterministic=not train)(x)
        return nn.Dense(self.num_classes, name="output")(x)


def _checked(module: nn.Module, input_shape: Shape, num_classes: int, lowering: str | None, smallest: int) -> Model:
    """The model, after checks that would otherwise fail deep inside a trace."""
    check.whole("num_classes", num_classes, 2)
    check_shape(input_shape, rank=3)
    big_enough = min(input_shape[:2]) >= smallest
    check.require(big_enough, "input_shape", input_shape, f"at least {smallest} x {smallest} pixels")
    if lowering is not None:
        registry.find("lowering", LOWERINGS, lowering)
    return from_flax(module, input_shape=input_shape)


def lenet5(*, num_classes: int = 10, input_shape: Shape = (28, 28, 1), lowering: str | None = None) -> Model:
    """LeNet-5 with ReLU and max-pooling: 61,706 parameters on 28 x 28 (LeCun et al., 1998).

    conv 5x5x6 (padded by 2), pool, conv 5x5x16, pool, dense 120, 84, classes. The original's sigmoid units, learned
    subsampling and partial connections between feature maps are replaced by their usual modern forms.
    """
    net = LeNet(num_classes, paddings=("SAME", "VALID"), lowering=lowering)
    return _checked(net, input_shape, num_classes, lowering, 12)


def lenet5_orthofl(*, num_classes: int = 10, input_shape: Shape = (28, 28, 1), lowering: str | None = None) -> Model:
    """OrthoFL's LeNet-5: no biases, no padding, average-pooling: 44,190 parameters on 28 x 28.

    5*5*6 + 5*5*6*16 + 256*120 + 120*84 + 84*10 = 150 + 2,400 + 30,720 + 10,080 + 840.
    """
    net = LeNet(num_classes, pool="avg", use_bias=False, lowering=lowering)
    return _checked(net, input_shape, num_classes, lowering, 16)


def lenet5_cifar(*, num_classes: int = 10, input_shape: Shape = (32, 32, 3), lowering: str | None = None) -> Model:
    """PushCen-ADFL's wide LeNet for CIFAR-10: conv 32 and 64 channels, 256,830 parameters on 32 x 32 x 3."""
    net = LeNet(num_classes, channels=(32, 64), lowering=lowering)
    return _checked(net, input_shape, num_classes, lowering, 16)


def cnn(*, num_classes: int = 10, input_shape: Shape = (32, 32, 3), lowering: str | None = None) -> Model:
    """CNN with conv 3x3x32, 3x3x64, max-pool, dense 128, dropout .25/.5: 1,626,442 parameters on 32 x 32 x 3.

    896 + 18,496 + (14*14*64)*128 + 128 + 1,290; on 28 x 28 x 1 it has 1,199,882.
    """
    return _checked(CNN(num_classes, lowering), input_shape, num_classes, lowering, 6)
