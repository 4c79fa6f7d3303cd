"""Everything that defines a run, as plain values: what the command line sets and ``settings.json`` keeps."""

from __future__ import annotations

import dataclasses
from typing import Any

from fedjax_async import check
from fedjax_async.engine.plan import BATCHINGS


def _field(default: Any, about: str, group: str) -> Any:
    return dataclasses.field(default=default, metadata={"about": about, "group": group})


@dataclasses.dataclass(frozen=True)
class Settings:
    """One run. Names with options are specs, ``NAME:key=value,key=value``; see ``fedjax-async list``."""

    method: str = _field("fedasync", "algorithm, e.g. fedasync:mixing=0.6", "method")
    timing: str | None = _field(
        None, "when a server step happens, e.g. buffer:size=5 (default: the method's)", "method"
    )
    delay: str = _field("rpi", "how long jobs take, e.g. lognormal:sigma=0.5", "method")

    dataset: str = _field("fashion_mnist_6k", "data set", "data")
    partition: str = _field("dirichlet:alpha=0.1", "who owns which examples", "data")
    clients: int = _field(10, "number of clients N", "data")
    test_fraction: float | None = _field(None, "part of each client's examples kept for its own test", "data")

    model: str = _field("lenet5", "model, e.g. mlp:hidden=64", "training")
    optimizer: str = _field("sgd", "local optimiser, e.g. sgd:momentum=0.9", "training")
    lr: float = _field(0.01, "local learning rate", "training")
    decay: str = _field("constant", "learning rate over server steps, e.g. cosine:steps=500", "training")
    batch_size: int = _field(32, "local minibatch size B", "training")
    epochs: float | None = _field(None, "local epochs a job, fractions too (default 1 unless --steps)", "training")
    steps: int | None = _field(None, "local steps a job, instead of epochs", "training")
    compute: str = _field("float32", "arithmetic of the local steps: float32, bfloat16 or float64", "training")

    time: float | None = _field(None, "end after this many virtual seconds", "budget")
    updates: int | None = _field(None, "end after this many applied updates", "budget")
    server_steps: int | None = _field(None, "end after this many server steps", "budget")
    eval_time: float | None = _field(None, "evaluate every so many virtual seconds", "budget")
    eval_updates: int | None = _field(None, "evaluate every so many updates", "budget")
    eval_steps: int | None = _field(None, "evaluate every so many server steps", "budget")
    eval_at: str | None = _field(None, "evaluate at these virtual seconds, e.g. 100,500,2000", "budget")
    per_client: bool = _field(False, "evaluate on each client's own test part too", "budget")

    seed: int = _field(0, "seed of the world (partition, delays) and of learning", "execution")
    engine: str = _field("waves", "waves (batched) or reference (one event at a time)", "execution")
    max_width: int | None = _field(None, "most jobs trained in one batch (default: by backend)", "execution")
    lanes: int | None = _field(None, "batches trained at the same time (default: one a CPU core)", "execution")
    batching: str | None = _field(None, "vmap or loop: how a batch is trained (default: loop on a CPU)", "execution")
    on_bad: str = _field("reject", "non-finite uploads: reject (and count) or raise", "execution")

    def __post_init__(self) -> None:
        """Check what does not depend on other rooms; names are checked where they are resolved."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if str(field.type).startswith("str") and not (value is None and "None" in str(field.type)):
                check.require(
                    isinstance(value, str), field.name, value, "a text such as " + repr(field.default or "every")
                )
        check.whole("clients", self.clients)
        check.whole("batch_size", self.batch_size)
        check.positive("lr", self.lr)
        check.whole("seed", self.seed, low=0, high=2**31 - 1)
        check.one_of("engine", self.engine, ("waves", "reference"))
        check.one_of("on_bad", self.on_bad, ("reject", "raise"))
        if self.batching is not None:
            check.one_of("batching", self.batching, BATCHINGS)
        check.one_of("compute", self.compute, ("float32", "bfloat16", "float64"))
        if self.max_width is not None:
            check.whole("max_width", self.max_width)
        if self.lanes is not None:
            check.whole("lanes", self.lanes)
        if self.epochs is not None and self.steps is not None:
            raise ValueError(f"epochs = {self.epochs}, steps = {self.steps}: give at most one of the two")
        if self.time is None and self.updates is None and self.server_steps is None:
            raise ValueError("time, updates, server_steps = None: give at least one, or the run has no end")


def as_dict(settings: Settings) -> dict[str, Any]:
    """The settings as a JSON-ready dict."""
    return dataclasses.asdict(settings)
