"""Models: modules in, ``Model(init, apply, loss)`` out. No other folder of the package imports flax or runs PyTorch.

Start with :func:`from_flax` (``wrap.py``), which makes a ``Model`` of a flax.linen module; ``nnx.py`` does the same for
flax.nnx modules, ``torch_modules.py`` for those of PyTorch, ``modules.py`` for any. :func:`make` makes one by name.

- ``small.py``: linear and logistic regression, MLP, LeNet-5, CNN;
- ``alexnet_vgg.py``, ``resnet.py``, ``mobilenet.py``: larger image networks; they share ``blocks.py`` and ``norm.py``
  (normalisation);
- ``encoder.py``: a pretrained language model with adapters; ``pretrained.py`` reads its files; ``lora.py``: low-rank
  adapters of any model;
- ``characters.py``: models of text, character by character;
- ``weights.py``: params by name, and files of weights; ``safetensors.py``: one of the file formats;
  ``state_dicts.py``: params under PyTorch's names; ``personal.py``: layers that stay with their client;
- ``torch_graphs.py``: the forward pass of a PyTorch module, of ``torch_ops.py`` and ``torch_layers.py``;
- ``labels.py``: loss and accuracy of labels; ``metrics.py``: other metrics of outputs;
- ``conv.py``: convolutions and pools that batch well; ``lowerings.py``, ``tiles.py``, ``winograd.py`` and
  ``winograd_tiles.py`` compute them; ``choice.py`` selects the fastest.
"""

from __future__ import annotations

from collections.abc import Callable

# fmt: off
from fedjax_async.base import lazy, registry
from fedjax_async.models.alexnet_vgg import alexnet, vgg11
from fedjax_async.models.characters import char_gru as char_gru, char_transformer as char_transformer
from fedjax_async.models.choice import default_lowering as default_lowering
from fedjax_async.models.conv import Conv as Conv, ConvPool as ConvPool, avg_pool as avg_pool, max_pool as max_pool
from fedjax_async.models.encoder import minilm_lora as minilm_lora
from fedjax_async.models.labels import PADDING as PADDING, cross_entropy as cross_entropy, hits as hits
from fedjax_async.models.lora import lora as lora
from fedjax_async.models.lowerings import LOWERINGS as LOWERINGS
from fedjax_async.models.metrics import METRICS as METRICS, Metric as Metric
from fedjax_async.models.mobilenet import mobilenetv2
from fedjax_async.models.modules import from_module as from_module, is_module as is_module
from fedjax_async.models.nnx import from_nnx as from_nnx
from fedjax_async.models.norm import (NORMS as NORMS, STATISTICS as STATISTICS, BatchNorm as BatchNorm,
    GroupNorm as GroupNorm)
from fedjax_async.models.resnet import resnet18, resnet18_1d
from fedjax_async.models.safetensors import read_safetensors as read_safetensors
from fedjax_async.models.small import cnn, lenet5, lenet5_cifar, lenet5_orthofl, linear as linear, logistic, mlp
from fedjax_async.models.state_dicts import (flattened as flattened, from_torch as from_torch,
    layer_names as layer_names, to_torch as to_torch)
from fedjax_async.models.torch_modules import from_torch_module as from_torch_module
from fedjax_async.models.weights import (arrays_of as arrays_of, filled as filled, read_arrays as read_arrays,
    write_arrays as write_arrays)
from fedjax_async.models.wrap import (augmented as augmented, decoded as decoded, from_flax as from_flax,
    in_dtype as in_dtype, rematerialised as rematerialised, starts_alike as starts_alike)
from fedjax_async.types import Model
# fmt: on

MODELS: dict[str, Callable[..., Model]] = {
    "linear": linear,
    "logistic": logistic,
    "mlp": mlp,
    "lenet5": lenet5,
    "lenet5_orthofl": lenet5_orthofl,
    "lenet5_cifar": lenet5_cifar,
    "cnn": cnn,
    "alexnet": alexnet,
    "vgg11": vgg11,
    "resnet18": resnet18,
    "resnet18_1d": resnet18_1d,
    "mobilenetv2": mobilenetv2,
    "minilm_lora": minilm_lora,
    "char_gru": char_gru,
    "char_transformer": char_transformer,
}
OF_TEXT = ("char_gru", "char_transformer")  # inputs are codes of characters; each gets one row of outputs
NEED_WEIGHTS = ("minilm_lora",)  # pretrained models of text: their weights must be fetched first

lazy.set_all(__name__)


def make(spec: str, *, num_classes: int | None = None, input_shape: tuple[int, ...] | None = None) -> Model:
    """The model of a spec such as ``"mlp:hidden=200x100"``; its options override ``num_classes`` and ``input_shape``.

    >>> make("mlp:hidden=32", num_classes=4, input_shape=(8, 8, 1)).init is not None
    True
    """
    given = {"num_classes": num_classes, "input_shape": input_shape}
    return registry.spec("model", MODELS, spec, **{k: v for k, v in given.items() if v is not None}).make()
