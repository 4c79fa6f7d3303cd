"""All settings of a run, as plain values: the command line sets them, ``settings.json`` keeps them.

A new setting is a field here, a row of the table in ``concerns.py``, and a check of its values in ``allowed.py``.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Mapping
from typing import Any

from fedjax_async import check, inputs
from fedjax_async.config import allowed, concerns, earlier, own, words
from fedjax_async.identity import GONE
from fedjax_async.notices import RunWarning

SWEEP_KEYS = ("base", "grid", "points", "roles", "seeds", "target", "final", "interval")  # keys of a sweep's file
USUAL_PARTITION = "dirichlet:alpha=0.1"  # for data sets that name no owners of their examples


def _field(default: Any, about: str, group: str) -> Any:
    return dataclasses.field(default=default, metadata={"about": about, "group": group})


EVALUATIONS = ("eval_time", "eval_updates", "eval_steps", "eval_at")


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of one run. A name with options is a spec, ``NAME:key=value,key=value``; see ``fedjax-async list``.

    A setting that names a part of the run also takes an object of your own (``config.own``).

    Raises: ``ValueError`` for values out of range, settings that exclude each other, and a run without an end.
    """

    method: str = _field(
        "fedasync", "algorithm, e.g. fedasync:mixing=0.6 or fedbuff+swa:start=0.5 (`list methods` shows all)", "method"
    )
    timing: str | None = _field(
        None, "when the server takes a step, e.g. buffer:size=5 [the method's; left out with METHOD@TIMING]", "method"
    )
    policy: str | None = _field(
        None,
        "decides during the run which clients train next, how large the buffer is or which updates are uploaded, e.g. "
        "power_of_choice:d=20 or oort+true_bytes (`list policies` shows all)",
        "method",
    )
    topology: str | None = _field(
        None, "without a server: where nodes send messages, e.g. gossip:receivers=10 or ring [the method's]", "method"
    )
    exchange: str | None = _field(
        None,
        "without a server: how nodes send and mix messages, e.g. push_sum:policy=merge [the method's; left out with "
        "METHOD@EXCHANGE]",
        "method",
    )
    delay: str = _field("rpi", "how long the jobs of clients take, e.g. lognormal:sigma=0.5", "method")

    availability: str | None = _field(None, "when clients are online, e.g. sessions:on=600,off=300", "conditions")
    faults: str | None = _field(
        None, "faults to simulate, e.g. drop:probability=0.1+duplicate:probability=0.05", "conditions"
    )
    network: str | None = _field(
        None, "transfer times, added to the delays, e.g. link:down=1e6,up=2e5 (bytes per second)", "conditions"
    )
    timeout: float | None = _field(None, "the server gives up a job after X virtual seconds", "conditions")
    late: str = _field("apply", "what happens to an upload that arrives after the timeout: apply or drop", "conditions")
    max_staleness: int | None = _field(None, "the server drops uploads staler than N server steps", "conditions")
    norm_limit: float | None = _field(None, "uploads of a larger Euclidean norm are rejected", "conditions")

    dataset: str = _field("fashion_mnist_6k", "data set (`list datasets` shows all)", "data")
    partition: str | None = _field(
        None, f"how examples are divided among clients, e.g. iid [{USUAL_PARTITION}, or the natural owners]", "data"
    )
    clients: int = _field(10, "number of clients", "data")
    test_fraction: float | None = _field(
        None, "fraction of each client's examples kept for its own test [none; without a server 0.2]", "data"
    )
    validation_fraction: float | None = _field(
        None, "fraction of each client's training examples held out for tuning: evaluated, never trained on", "data"
    )

    normalise: str | None = _field(
        None,
        "how inputs are standardised: published (with the data set's published constants; the default if it has "
        "some), training (with the mean and deviation of the training part) or none",
        "data",
    )
    augment: str | None = _field(None, "random changes of training images, e.g. crop:padding=4+flip", "data")

    attack: str | None = _field(
        None, "attack by some of the clients, e.g. sign_flip:share=0.2 (`list attacks` shows all)", "security"
    )
    privacy: str | None = _field(
        None,
        "clip and noise for uploads (dp:clip=1,noise=0.5) or for gradients (dp_sgd), or secure aggregation "
        "(secure:size=10); + joins several",
        "security",
    )

    model: str = _field("lenet5", "model, e.g. mlp:hidden=64 (`list models` shows all)", "training")
    initial: str | None = _field(
        None,
        "initial weights: a file (.npz, .safetensors, .pt) or the folder of a run [random]",
        "training",
    )
    initial_rename: str | None = _field(
        None,
        "layers that have another name in the file of --initial, which then has PyTorch's names: LAYER=NAME, several "
        "joined by commas, as --rename of export",
        "training",
    )
    client: str | None = _field(None, "your own local training, by its registered name [the method's]", "training")
    optimizer: str | None = _field(None, "local optimiser, e.g. sgd:momentum=0.9 [sgd, or the method's]", "training")
    lr: float | None = _field(None, "local learning rate [0.01, or the method's]", "training")
    decay: str = _field(
        "constant",
        "schedule of the learning rate over server steps, e.g. cosine:steps=500; linear: within each job",
        "training",
    )
    batch_size: int = _field(32, "local minibatch size B", "training")
    epochs: float | None = _field(None, "local epochs per job, also fractions [1, unless --steps is given]", "training")
    steps: int | None = _field(None, "local steps per job, instead of epochs", "training")
    compute: str = _field("float32", "arithmetic of the local steps: float32, bfloat16 or float64", "training")

    personal: str | None = _field(
        None,
        "layers that are never uploaded and stay with their client, e.g. output or conv*,fc1; norms: all "
        "normalisation layers (FedBN); --per-client scores the clients' models",
        "personalisation",
    )
    ditto: float | None = _field(
        None,
        "each client also trains a personal model (Ditto), pulled towards the global model with this weight; "
        "--per-client scores it",
        "personalisation",
    )

    compress: str | None = _field(None, "compressor of the uploads, e.g. topk:ratio=0.1", "compression")
    feedback: str | None = _field(
        None, "error feedback for the compressor: off, ef or ef21 [ef; of asynflc off]", "compression"
    )
    compress_per: str | None = _field(
        None, "what is compressed as one vector: whole (all, the default), layer or tensor", "compression"
    )

    time: float | None = _field(None, "end after X virtual seconds", "budget")
    updates: int | None = _field(
        None, "end after N uploads; uploads of an incomplete server step are not used", "budget"
    )
    server_steps: int | None = _field(None, "end after N server steps", "budget")
    eval_time: float | None = _field(None, "evaluate every X virtual seconds [a fiftieth of the run]", "budget")
    eval_updates: int | None = _field(None, "evaluate every N updates", "budget")
    eval_steps: int | None = _field(None, "evaluate every N server steps", "budget")
    eval_at: str | None = _field(None, "evaluate at these virtual seconds, e.g. 100,500,2000", "budget")
    eval_examples: int | None = _field(None, "evaluate on N test examples, evenly spaced [all]", "budget")
    stop_at: float | None = _field(
        None,
        "stop at the first evaluation that reaches this accuracy, such as 0.9 (without class labels: this loss), on "
        "the validation part if there is one, else on the test set",
        "budget",
    )
    patience: int | None = _field(
        None, "stop after N evaluations in a row without a better accuracy (or loss)", "budget"
    )
    per_client: bool = _field(False, "also evaluate on each client's own test part", "budget")
    global_tests: str | None = _field(
        None,
        "without a server: when every node's model and the mean model are also scored on the global test set: all "
        "(evaluations), ends (the first and the last) or never [ends]",
        "budget",
    )

    metrics: str | None = _field(
        None, "more metrics beside loss and accuracy, e.g. top:k=5,macro_f1 (`list metrics` shows all)", "measures"
    )
    train_loss: bool = _field(False, "also measure the loss on the clients' training examples", "measures")
    train_examples: int | None = _field(
        None, "measure the training loss on N examples, drawn by the seed [all]; implies --train-loss", "measures"
    )
    fine_tune: int | None = _field(
        None,
        "at every evaluation, each client trains a copy of the global model for N local steps and scores it on its "
        "own test part",
        "measures",
    )

    energy: str | None = _field(
        None,
        "count what jobs and messages cost the devices (columns energy and carbon), e.g. boards or csv:path=FILE",
        "measures",
    )

    seed: int = _field(
        0, "seed of all that is random: partition, delays, initial weights, minibatches... [0]", "execution"
    )
    engine: str = _field("waves", "waves (jobs in batches) or reference (one event at a time, slow)", "execution")
    max_width: int | None = _field(None, "most jobs in one batch [by backend]", "execution")
    lanes: int | None = _field(None, "batches trained at a time, a thread each [one per CPU core]", "execution")
    batching: str | None = _field(None, "how a batch is trained: vmap or loop [loop on a CPU, else vmap]", "execution")
    devices: int | None = _field(None, "devices that share the jobs of a batch [one]", "execution")
    memory_limit: str | None = _field(None, "most device memory of a run, e.g. 4GB: batches shrink to fit", "execution")
    slots: str = _field("full", "precision of the start models kept for clients: full or bfloat16", "execution")
    remat: bool = _field(False, "recompute activations instead of keeping them: less memory, more work", "execution")
    checkpoint: int | None = _field(None, "save a checkpoint every N updates (with --out)", "execution")
    on_bad: str = _field(
        "reject", "what happens to a non-finite upload: reject (and count) or raise (an error)", "execution"
    )

    def __new__(cls, *values: Any, **given: Any) -> Settings:
        """Refuse an unknown name with the nearest ones; ``__init__`` would only say that it is unexpected."""
        for name in given:
            words.require("setting", name, cls.__dataclass_fields__)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Check what needs no other package; names are checked where they are resolved."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (str, os.PathLike)) or not str(field.type).startswith("str"):  # not an object
                value = check.plain(value)
                object.__setattr__(self, field.name, value)
            if str(field.type).startswith("str") and not (value is None and "None" in str(field.type)):
                if field.name in own.KINDS and value is not None and not isinstance(value, str):
                    object.__setattr__(self, field.name, own.as_setting(field.name, value))
                    continue
                own.require_fitting(field.name, value)
                example = allowed.EXAMPLES.get(field.name) or f"a text such as {field.default!r}"
                check.require(
                    isinstance(value, str) and (value != "" or field.default is not None), field.name, value, example
                )
            if field.type == "bool":
                check.require(isinstance(value, bool), field.name, value, "True or False")
        for name, requirement in allowed.CHECKS.items():
            value = getattr(self, name)
            if value is not Settings.__dataclass_fields__[name].default:
                requirement(name, value)
        if self.engine == "reference":
            concerns.refuse("reference", given_in(self))
        check.require(self.late == "apply" or self.timeout is not None, "late", self.late, "left out without a timeout")
        renames = self.initial_rename is None or self.initial is not None
        check.require(renames, "initial_rename", self.initial_rename, "left out without initial")
        alone = self.eval_examples is None or (self.test_fraction is None and not self.per_client)
        check.require(alone, "eval_examples", self.eval_examples, "left out where clients have tests of their own")
        for rivals in (("epochs", "steps"), EVALUATIONS):
            given = [f"{name} = {getattr(self, name)}" for name in rivals if getattr(self, name) is not None]
            if len(given) > 1:
                raise ValueError(f"{', '.join(given)}: give at most one of the {'two' if len(rivals) == 2 else 'four'}")
        if self.time is None and self.updates is None and self.server_steps is None:
            raise ValueError(
                "time, updates, server_steps = None: give at least one, or the run has no end (only the command line "
                "has a default, updates = 200)"
            )
        for name in FLOATS:  # at the end, so that messages show what was given
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else float(value))


# Settings that files leave out where they have their default.
OPTIONAL = (
    "policy", "topology", "exchange", "global_tests", "initial", "initial_rename", "client", "stop_at", "patience",
    "metrics",
    "train_loss", "train_examples", "fine_tune", "normalise", "augment", "personal", "ditto", "attack", "privacy",
)  # fmt: skip


FLOATS = tuple(field.name for field in dataclasses.fields(Settings) if str(field.type).startswith("float"))
DEFAULTS: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(Settings)}


def fields_of(settings: Settings) -> dict[str, Any]:
    """The settings by name, with the objects that they hold."""
    return {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}


def given_in(settings: Settings) -> dict[str, Any]:
    """The settings that differ from their defaults, by name."""
    return {name: value for name, value in fields_of(settings).items() if value != DEFAULTS[name]}


def as_dict(settings: Settings) -> dict[str, Any]:
    """The settings as a JSON-ready dict: objects by their names.

    ``own`` has the fingerprints of own parts and, in a prepared run, ``files`` the digests of input files
    (``config.inputs``). They are left out if they are empty, an ``OPTIONAL`` setting if it is None or False. Settings
    that a client algorithm of the user's own does not take are None. ``defaults`` has what a method whose defaults have
    changed leaves open.
    """
    fields = fields_of(settings)
    parts = own.own_parts(fields)
    plain = {name: str(value) if isinstance(value, str) else value for name, value in fields.items()}
    unused = [name for name in OPTIONAL if plain[name] is None or plain[name] is False]
    plain = {name: value for name, value in plain.items() if name not in unused}
    if _trains_by_itself(settings):
        plain |= {name: None for name in concerns.without_effect("own_client") if plain.get(name)}
    files = inputs.described(fields)
    left = earlier.defaults_of(settings.method, settings.timing)
    plain |= {"defaults": left} if left is not None else {}
    return plain | ({"own": parts} if parts else {}) | ({"files": files} if files else {})


def _trains_by_itself(settings: Settings) -> bool:
    """Whether the client is an algorithm with its own optimiser, and neither a name nor a factory."""
    client = settings.client
    if not isinstance(client, own.Named):
        return False
    if client.thing is own.ABSENT:  # read from a file, where a factory has its optimiser or rate
        return settings.optimizer is None and settings.lr is None
    return not callable(client.thing)


def require_named(settings: Settings) -> None:
    """``ValueError`` unless each object of the user's own has a name that a folder can keep."""
    own.require_names(fields_of(settings), "a folder of results")


def from_dict(content: Mapping[str, Any], objects: Mapping[str, Any] | None = None) -> Settings:
    """The settings that :func:`as_dict` wrote; ``objects``: own parts by setting, to replace their names.

    Defaults of methods are those of the version that wrote them. Settings that no longer exist are left out, with a
    warning (``notices.RunWarning``).

    Raises ``ValueError`` for an own part with other code than the file says, and for values out of range.
    """
    content = dict(content)
    gone = [name for name in GONE if content.pop(name, None) is not None]
    if gone:
        text = f"{' and '.join(gone)} of an earlier version: left out; the results do not depend on it"
        warnings.warn(text, RunWarning, stacklevel=2)
    files = content.pop("files", {})
    fields = own.restored(content, objects or {})
    absent = [field for field, value in fields.items() if isinstance(value, own.Named)]
    fields = inputs.restored(fields, {field: files[field] for field in files if field not in absent})
    kept = fields.pop("defaults", None)
    fields["method"] = earlier.as_meant(fields.get("method", Settings.method), fields.get("timing"), kept)
    brought = concerns.without_effect("own_client")
    return Settings(**{name: value for name, value in fields.items() if not (name in brought and value is None)})
