"""The settings of local training, of what stays with a client, and of compression."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypedDict

from fedjax_async.base import check
from fedjax_async.config.fields import known, one_of, setting, whole

if TYPE_CHECKING:
    import optax

    from fedjax_async.compress import Compressor
    from fedjax_async.config.own import Named
    from fedjax_async.types import ClientAlgorithm, Model, Params


@dataclasses.dataclass(frozen=True)
class OfTraining:
    """The model and local training."""

    model: str | Named = setting("lenet5", "model, e.g. mlp:hidden=64 (`list models` shows all)", "world")
    initial: str | Named | None = setting(
        None,
        "initial weights: a file (.npz, .safetensors, .pt) or the folder of a run [random]",
        "compared",
        example="a text, the name of a file or folder",
        rare=True,
    )
    initial_rename: str | None = setting(
        None,
        "layers that have another name in the file of --initial, which then has PyTorch's names: LAYER=NAME, several "
        "joined by commas, as --rename of export",
        "compared",
        example="a text such as 'conv1=features.0,fc1=classifier'",
        rare=True,
    )
    client: str | Named | None = setting(
        None,
        "your own local training, by its registered name [the method's]",
        "compared",
        example="a text, the name of a registered client",
        rare=True,
    )
    optimizer: str | Named | None = setting(
        None,
        "local optimiser, e.g. sgd:momentum=0.9 [sgd, or the method's]",
        "tuned",
        without="own_client",
        example="a text such as 'sgd:momentum=0.9'",
    )
    lr: float | None = setting(
        None, "local learning rate [0.01, or the method's]", "tuned", without="own_client", requires=check.real_positive
    )
    decay: str = setting(
        "constant",
        "schedule of the learning rate over server steps, e.g. cosine:steps=500; linear: within each job",
        "tuned",
        without="own_client",
    )
    batch_size: int = setting(32, "local minibatch size B", "tuned", requires=check.whole)
    epochs: float | None = setting(
        None, "local epochs per job, also fractions [1, unless --steps is given]", "tuned", requires=check.real_positive
    )
    steps: int | None = setting(
        None,
        "local steps per job, instead of epochs",
        "tuned",
        requires=whole(high=2**31 - 1),
    )
    compute: str = setting(
        "float32",
        "arithmetic of the model, in local steps and evaluations: float32, bfloat16 or float64",
        "compared",
        requires=one_of("float32", "bfloat16", "float64"),
    )


@dataclasses.dataclass(frozen=True)
class OfPersonalisation:
    """What stays with a client."""

    personal: str | None = setting(
        None,
        "layers that are never uploaded and stay with their client, e.g. output or conv*,fc1; norms: all "
        "normalisation layers (FedBN); --per-client scores the clients' models",
        "compared",
        without="own_client",
        rare=True,
    )
    ditto: float | None = setting(
        None,
        "each client also trains a personal model (Ditto), pulled towards the global model with this weight; "
        "--per-client scores it",
        "tuned",
        without="nodes trajectory explain own_client",
        requires=check.real_non_negative,
        rare=True,
    )


@dataclasses.dataclass(frozen=True)
class OfCompression:
    """What is sent in place of an upload."""

    compress: str | Named | None = setting(None, "compressor of the uploads, e.g. topk:ratio=0.1", "compared")
    feedback: str | None = setting(
        None,
        "error feedback for the compressor: off, ef or ef21 [ef; off for qsgd, unbiased randk, sign and asynflc]",
        "compared",
        without="nodes",
        requires=known,
        example="a text such as 'ef'",
    )
    compress_per: str | None = setting(
        None,
        "what is compressed as one vector: whole (all, the default), layer or tensor",
        "compared",
        without="nodes",
        requires=known,
        example="a text such as 'layer'",
    )


class TrainingKeywords(TypedDict, total=False):
    """The same as typed keywords."""

    model: str | Named | Model | Any
    initial: str | Named | Params | None
    initial_rename: str | None
    client: str | Named | ClientAlgorithm | Callable[..., ClientAlgorithm] | None
    optimizer: str | Named | optax.GradientTransformation | Callable[..., optax.GradientTransformation] | None
    lr: float | None
    decay: str
    batch_size: int
    epochs: float | None
    steps: int | None
    compute: str
    personal: str | None
    ditto: float | None
    compress: str | Named | Compressor | None
    feedback: str | None
    compress_per: str | None
