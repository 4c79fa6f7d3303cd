"""Everything that defines a run, as plain values: the command line sets them, ``settings.json`` keeps them.

A new setting is a field here, a row of the table in ``concerns.py``, and a check of its values in ``_CHECKS``.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fedjax_async import check
from fedjax_async.config import concerns, own

SWEEP_KEYS = ("base", "grid", "points", "roles", "seeds", "target", "final", "interval")  # of a sweep's file
MOMENTS = "a text of virtual seconds >= 0 joined by commas, such as '100,500'"
USUAL_PARTITION = "dirichlet:alpha=0.1"  # for a pool of examples; data that name owners keep them


def _field(default: Any, about: str, group: str) -> Any:
    return dataclasses.field(default=default, metadata={"about": about, "group": group})


def _one_of(*names: str) -> Callable[[str, Any], None]:
    return lambda field, value: check.one_of(field, value, names)


def _known(field: str, value: Any) -> None:
    """One of the names of a registry. The registries need JAX, so they are imported only for a given value."""
    from fedjax_async.data.normalise import NORMALISATIONS  # noqa: PLC0415
    from fedjax_async.engine.batches import BATCHINGS  # noqa: PLC0415
    from fedjax_async.engine.peer_outcome import GLOBAL_TESTS  # noqa: PLC0415
    from fedjax_async.engine.storage import SLOT_DTYPES  # noqa: PLC0415
    from fedjax_async.geometry import GROUPINGS  # noqa: PLC0415
    from fedjax_async.local import FEEDBACKS  # noqa: PLC0415

    registries: dict[str, Iterable[str]] = {
        "global_tests": GLOBAL_TESTS,
        "feedback": FEEDBACKS,
        "compress_per": GROUPINGS,
        "slots": SLOT_DTYPES,
        "batching": BATCHINGS,
        "normalise": NORMALISATIONS,
    }
    check.one_of(field, value, registries[field])


def _size(field: str, value: Any) -> None:
    from fedjax_async.engine.devices import parse_size  # noqa: PLC0415

    parse_size(field, value)


def _fraction(field: str, value: Any) -> None:
    check.require(check.is_real(value) and 0 < value < 1, field, value, "a number between 0 and 1, both excluded")


def moments(text: str) -> list[float]:
    """``"100,500"`` -> [100.0, 500.0]; ``ValueError`` naming ``eval_at``."""
    try:
        plain = text.isascii() and "_" not in text
        found = [float(part) if plain else -1.0 for part in text.split(",")]
    except ValueError:
        found = [-1.0]
    check.require(all(check.is_real(moment) and moment >= 0 for moment in found), "eval_at", text, MOMENTS)
    check.require(
        all(a < b for a, b in itertools.pairwise(found)), "eval_at", text, "in increasing order, each moment once"
    )
    return found


# Checks of values other than the default.
MOST_LANES = 1024  # each is a thread of the host

_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "clients": check.whole,
    "batch_size": check.whole,
    "lr": check.real_positive,
    "time": check.real_positive,
    "updates": check.whole,
    "server_steps": check.whole,
    "eval_time": check.real_positive,
    "eval_updates": check.whole,
    "eval_steps": check.whole,
    "eval_at": lambda field, value: moments(value),
    "seed": lambda field, value: check.whole(field, value, low=0, high=2**31 - 1),
    "engine": _one_of("waves", "reference"),
    "on_bad": _one_of("reject", "raise"),
    "compute": _one_of("float32", "bfloat16", "float64"),
    "late": _one_of("apply", "drop"),
    "feedback": _known,
    "compress_per": _known,
    "slots": _known,
    "global_tests": _known,
    "batching": _known,
    "normalise": _known,
    "eval_examples": check.whole,
    "train_examples": check.whole,
    "fine_tune": check.whole,
    "stop_at": check.positive,
    "patience": check.whole,
    "max_width": check.whole,
    "lanes": lambda field, value: check.whole(field, value, high=MOST_LANES),
    "devices": check.whole,
    "checkpoint": check.whole,
    "timeout": check.real_positive,
    "norm_limit": check.real_positive,
    "test_fraction": _fraction,
    "validation_fraction": _fraction,
    "epochs": check.real_positive,
    "steps": lambda field, value: check.whole(field, value, high=2**31 - 1),
    "max_staleness": lambda field, value: check.whole(field, value, low=0),
    "memory_limit": _size,
}

# Of settings that hold a text and have no default that could be the example.
EXAMPLES = {
    "timing": "a text such as 'every'",
    "topology": "a text such as 'gossip:receivers=10'",
    "exchange": "a text such as 'push_sum:policy=merge'",
    "global_tests": "a text such as 'ends'",
    "availability": "a text such as 'sessions'",
    "faults": "a text such as 'drop:probability=0.1'",
    "network": "a text such as 'link:down=1e6,up=2e5'",
    "partition": "a text such as 'iid'",
    "augment": "a text such as 'crop:padding=4+flip'",
    "normalise": "a text such as 'training'",
    "attack": "a text such as 'sign_flip:share=0.2'",
    "privacy": "a text such as 'dp:clip=1,noise=0.5'",
    "client": "a text, the name of a registered client",
    "compress": "a text such as 'topk:ratio=0.1'",
    "feedback": "a text such as 'ef'",
    "compress_per": "a text such as 'layer'",
    "eval_at": MOMENTS,
    "batching": "a text such as 'vmap'",
    "optimizer": "a text such as 'sgd:momentum=0.9'",
    "metrics": "a text such as 'top:k=5,macro_f1'",
    "energy": "a text such as 'csv:path=watts.csv'",
    "memory_limit": "a text such as '4GB'",
}


# What other programs call a setting.
SYNONYMS = {
    "batch": "batch_size",
    "learning_rate": "lr",
    "local_epochs": "epochs",
    "local_steps": "steps",
    "n_clients": "clients",
    "num_clients": "clients",
    "num_rounds": "server_steps",
    "rounds": "server_steps",
}

EVALUATIONS = ("eval_time", "eval_updates", "eval_steps", "eval_at")


@dataclasses.dataclass(frozen=True)
class Settings:
    """One run. Names with options are specs, ``NAME:key=value,key=value``; see ``fedjax-async list``.

    Where a name stands for a part of the run, an object of your own may stand too (``config.own``).
    """

    method: str = _field("fedasync", "algorithm, e.g. fedasync:mixing=0.6 or fedbuff+swa:start=0.5", "method")
    timing: str | None = _field(
        None, "when a server step happens, e.g. buffer:size=5 (default: the method's; not for METHOD@TIMING)", "method"
    )
    topology: str | None = _field(
        None, "without a server: whom nodes push to, e.g. gossip:receivers=10 or ring (default: the method's)", "method"
    )
    exchange: str | None = _field(
        None,
        "without a server: which messages nodes push and mix, e.g. push_sum:policy=merge (default: the method's; not "
        "for METHOD@EXCHANGE)",
        "method",
    )
    delay: str = _field("rpi", "how long jobs take, e.g. lognormal:sigma=0.5", "method")

    availability: str | None = _field(None, "when clients are there, e.g. sessions:on=600,off=300", "world")
    faults: str | None = _field(None, "what goes wrong, e.g. drop:probability=0.1+duplicate:probability=0.05", "world")
    network: str | None = _field(None, "links on top of the delays, e.g. link:down=1e6,up=2e5", "world")
    timeout: float | None = _field(None, "the server gives a job up after this many virtual seconds", "world")
    late: str = _field("apply", "uploads that come after their timeout: apply or drop", "world")
    max_staleness: int | None = _field(None, "the server drops uploads staler than this", "world")
    norm_limit: float | None = _field(None, "the server rejects uploads of a larger Euclidean norm", "world")

    dataset: str = _field("fashion_mnist_6k", "data set", "data")
    partition: str | None = _field(
        None, f"who owns which examples (default: {USUAL_PARTITION}, or natural owners)", "data"
    )
    clients: int = _field(10, "number of clients N", "data")
    test_fraction: float | None = _field(
        None, "part of each client's examples kept for its own test [none; without a server 0.2]", "data"
    )
    validation_fraction: float | None = _field(
        None, "part of each client's training examples held out for tuning: evaluated, never trained on", "data"
    )

    normalise: str | None = _field(
        None,
        "inputs standardised by the data set's published constants (published, the default where it has some), by the "
        "training part's own mean and deviation (training), or not at all (none)",
        "data",
    )
    augment: str | None = _field(None, "change training images at random, e.g. crop:padding=4+flip", "data")

    attack: str | None = _field(
        None, "clients that attack, e.g. sign_flip:share=0.2 (list attacks shows all)", "security"
    )
    privacy: str | None = _field(
        None,
        "clip and noise of uploads (dp:clip=1,noise=0.5) or of gradients (dp_sgd), and secure aggregation "
        "(secure:size=10); joined with +",
        "security",
    )

    model: str = _field("lenet5", "model, e.g. mlp:hidden=64", "training")
    client: str | None = _field(
        None, "local training of your own, by its registered name (default: the method's)", "training"
    )
    optimizer: str | None = _field(None, "local optimiser, e.g. sgd:momentum=0.9 [sgd, or the method's]", "training")
    lr: float | None = _field(None, "local learning rate [0.01, or the method's]", "training")
    decay: str = _field(
        "constant", "learning rate over server steps, e.g. cosine:steps=500; linear: within each job", "training"
    )
    batch_size: int = _field(32, "local minibatch size B", "training")
    epochs: float | None = _field(None, "local epochs a job, fractions too (default 1 unless --steps)", "training")
    steps: int | None = _field(None, "local steps a job, instead of epochs", "training")
    compute: str = _field("float32", "arithmetic of the local steps: float32, bfloat16 or float64", "training")

    compress: str | None = _field(None, "compressor of the uploads, e.g. topk:ratio=0.1", "compression")
    feedback: str | None = _field(
        None, "what the compressor loses: off, ef (error feedback, the default) or ef21", "compression"
    )
    compress_per: str | None = _field(
        None, "what is compressed as one vector: whole (default), layer or tensor", "compression"
    )

    time: float | None = _field(None, "end after this many virtual seconds", "budget")
    updates: int | None = _field(
        None, "end after this many uploads; those of an incomplete server step are not used", "budget"
    )
    server_steps: int | None = _field(None, "end after this many server steps", "budget")
    eval_time: float | None = _field(None, "evaluate every so many virtual seconds", "budget")
    eval_updates: int | None = _field(None, "evaluate every so many updates", "budget")
    eval_steps: int | None = _field(None, "evaluate every so many server steps", "budget")
    eval_at: str | None = _field(None, "evaluate at these virtual seconds, e.g. 100,500,2000", "budget")
    eval_examples: int | None = _field(None, "evaluate on so many test examples, evenly spaced [all]", "budget")
    stop_at: float | None = _field(
        None,
        "stop at the evaluation that reaches this accuracy, such as 0.9 (without class labels: this loss); of the "
        "validation part if there is one, else of the test set",
        "budget",
    )
    patience: int | None = _field(
        None, "stop after so many evaluations without a better accuracy (or loss) than before", "budget"
    )
    per_client: bool = _field(False, "evaluate on each client's own test part too", "budget")
    global_tests: str | None = _field(
        None,
        "without a server: score every node's model, and the mean model, on the global test set too: at all "
        "evaluations, at the ends or never [ends]",
        "budget",
    )

    metrics: str | None = _field(
        None, "measure these too, beside loss and accuracy, e.g. top:k=5,macro_f1 (list metrics shows all)", "measures"
    )
    train_loss: bool = _field(False, "measure the loss on the clients' training examples too", "measures")
    train_examples: int | None = _field(
        None, "training loss on so many examples, drawn by the seed [all]; implies --train-loss", "measures"
    )
    fine_tune: int | None = _field(
        None,
        "at every evaluation, each client trains a copy of the global model for so many local steps and scores it on "
        "its own test part",
        "measures",
    )

    energy: str | None = _field(
        None,
        "count what jobs and messages cost the devices, in columns energy and carbon, e.g. boards or csv:path=FILE",
        "measures",
    )

    seed: int = _field(0, "seed of the world (partition, delays) and of learning", "execution")
    engine: str = _field("waves", "waves (batched) or reference (one event at a time)", "execution")
    max_width: int | None = _field(None, "most jobs trained in one batch (default: by backend)", "execution")
    lanes: int | None = _field(None, "batches trained at the same time (default: one a CPU core)", "execution")
    batching: str | None = _field(None, "vmap or loop: how a batch is trained (default: loop on a CPU)", "execution")
    devices: int | None = _field(None, "devices that share the jobs of a batch (default: one)", "execution")
    memory_limit: str | None = _field(None, "device memory a run may use, e.g. 4GB: batches shrink to fit", "execution")
    slots: str = _field("full", "precision of the start models kept for clients: full or bfloat16", "execution")
    remat: bool = _field(False, "recompute activations instead of keeping them: less memory, more work", "execution")
    checkpoint: int | None = _field(None, "save a checkpoint every so many updates (with --out)", "execution")
    on_bad: str = _field("reject", "non-finite uploads: reject (and count) or raise", "execution")

    def __post_init__(self) -> None:
        """Check what does not depend on other rooms; names are checked where they are resolved."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if str(field.type).startswith("str") and not (value is None and "None" in str(field.type)):
                if field.name in own.KINDS and value is not None and not isinstance(value, str):
                    object.__setattr__(self, field.name, own.as_setting(field.name, value))
                    continue
                example = EXAMPLES.get(field.name) or f"a text such as {field.default!r}"
                check.require(
                    isinstance(value, str) and (value != "" or field.default is not None), field.name, value, example
                )
            if field.type == "bool":
                check.require(isinstance(value, bool), field.name, value, "True or False")
            elif getattr(value, "shape", None) == ():  # a number of NumPy or JAX
                object.__setattr__(self, field.name, value.item())
        for name, requirement in _CHECKS.items():
            value = getattr(self, name)
            if value is not Settings.__dataclass_fields__[name].default:
                requirement(name, value)
        if self.engine == "reference":
            concerns.refuse("reference", given_in(self))
        check.require(self.late == "apply" or self.timeout is not None, "late", self.late, "left out without a timeout")
        alone = self.eval_examples is None or (self.test_fraction is None and not self.per_client)
        check.require(alone, "eval_examples", self.eval_examples, "left out where clients have tests of their own")
        for rivals in (("epochs", "steps"), EVALUATIONS):
            given = [f"{name} = {getattr(self, name)}" for name in rivals if getattr(self, name) is not None]
            if len(given) > 1:
                raise ValueError(f"{', '.join(given)}: give at most one of the {'two' if len(rivals) == 2 else 'four'}")
        if self.time is None and self.updates is None and self.server_steps is None:
            raise ValueError("time, updates, server_steps = None: give at least one, or the run has no end")


# Settings that files leave out where they have their default.
OPTIONAL = (
    "topology", "exchange", "global_tests", "client", "stop_at", "patience", "metrics", "train_loss", "train_examples",
    "fine_tune", "normalise", "augment", "attack", "privacy",
)  # fmt: skip


DEFAULTS: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(Settings)}


def fields_of(settings: Settings) -> dict[str, Any]:
    """The settings by name, with the objects that they hold."""
    return {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}


def given_in(settings: Settings) -> dict[str, Any]:
    """The settings that differ from their defaults, by name."""
    return {name: value for name, value in fields_of(settings).items() if value != DEFAULTS[name]}


def as_dict(settings: Settings) -> dict[str, Any]:
    """The settings as a JSON-ready dict: objects by their names, and ``own`` with the fingerprints of own parts.

    ``own`` and the ``OPTIONAL`` settings are left out where there are none. What an own client algorithm brings itself
    is None.
    """
    fields = fields_of(settings)
    parts = own.own_parts(fields)
    plain = {name: str(value) if isinstance(value, own.Named) else value for name, value in fields.items()}
    unused = [name for name in OPTIONAL if plain[name] is None or plain[name] is False]
    plain = {name: value for name, value in plain.items() if name not in unused}
    if _trains_by_itself(settings):
        plain |= {name: None for name in concerns.without_effect("own_client") if plain.get(name)}
    return plain | ({"own": parts} if parts else {})


def _trains_by_itself(settings: Settings) -> bool:
    """Whether the client is an algorithm with its own optimiser, and neither a name nor a factory."""
    client = settings.client
    if not isinstance(client, own.Named):
        return False
    if client.thing is own.ABSENT:  # known from a file, which keeps the optimiser or the rate that a factory takes
        return settings.optimizer is None and settings.lr is None
    return not callable(client.thing)


def require_named(settings: Settings) -> None:
    """``ValueError`` unless each object of the user's own has a name that a folder can keep."""
    own.require_names(fields_of(settings), "a folder of results")


def from_dict(content: Mapping[str, Any], objects: Mapping[str, Any] | None = None) -> Settings:
    """The settings that :func:`as_dict` wrote; ``objects``: own parts by setting, in the place of their names."""
    fields = own.restored(content, objects or {})
    brought = concerns.without_effect("own_client")
    return Settings(**{name: value for name, value in fields.items() if not (name in brought and value is None)})
