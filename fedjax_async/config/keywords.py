"""The settings as keyword parameters of ``simulate``, ``compare`` and ``sweep``: editors and type checkers see them.

Type checkers read the classes here; ``signed`` gives the same parameters, with the defaults of ``Settings``, to
``inspect.signature``, which notebooks complete from. A test holds the classes against the fields of ``Settings``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from fedjax_async.config.settings import DEFAULTS

if TYPE_CHECKING:
    import networkx as nx

    from fedjax_async.clock import DelayModel, Exchange, PolicyModel, Timing, TopologyModel
    from fedjax_async.clock.availability import AvailabilityModel
    from fedjax_async.clock.faults import FaultModel
    from fedjax_async.clock.network import NetworkModel
    from fedjax_async.compress import Compressor
    from fedjax_async.data import Dataset, Federation
    from fedjax_async.data.augment import Augment
    from fedjax_async.data.partition import Partitioner
    from fedjax_async.method import Method
    from fedjax_async.models.metrics import Metric
    from fedjax_async.spec import Spec
    from fedjax_async.types import ClientAlgorithm, FederatedData, Model, Params

Called = TypeVar("Called", bound=Callable[..., Any])


class OfAnyRun(TypedDict, total=False):
    """The settings that ``simulate``, ``compare`` and ``sweep`` take; ``Settings`` says what each means."""

    timing: str | Timing | None
    policy: str | PolicyModel | None
    topology: str | TopologyModel | nx.Graph | Sequence[nx.Graph] | None
    exchange: str | Exchange | None
    delay: str | DelayModel
    availability: str | AvailabilityModel | None
    faults: str | FaultModel | None
    network: str | NetworkModel | None
    timeout: float | None
    late: str
    max_staleness: int | None
    norm_limit: float | None
    dataset: str | Dataset | Federation | FederatedData
    partition: str | Partitioner | None
    clients: int
    test_fraction: float | None
    validation_fraction: float | None
    normalise: str | None
    augment: str | Augment | None
    attack: str | None
    privacy: str | None
    model: str | Model | Any  # or a flax module
    initial: str | Params | None
    initial_rename: str | None
    client: str | ClientAlgorithm | Callable[..., ClientAlgorithm] | None
    optimizer: str | None
    lr: float | None
    decay: str
    batch_size: int
    epochs: float | None
    steps: int | None
    compute: str
    personal: str | None
    ditto: float | None
    compress: str | Compressor | None
    feedback: str | None
    compress_per: str | None
    time: float | None
    updates: int | None
    server_steps: int | None
    eval_time: float | None
    eval_updates: int | None
    eval_steps: int | None
    eval_at: str | None
    eval_examples: int | None
    stop_at: float | None
    patience: int | None
    per_client: bool
    global_tests: str | None
    metrics: str | Mapping[str, Callable[..., Any] | Metric] | None
    train_loss: bool
    train_examples: int | None
    fine_tune: int | None
    energy: str | None
    seed: int
    engine: str
    max_width: int | None
    batching: str | None
    slots: str
    remat: bool
    on_bad: str


class OfSweeps(OfAnyRun, total=False):
    """The settings that ``sweep`` takes as keywords."""

    method: str | Method | Spec


class OfComparisons(OfAnyRun, total=False):
    """The settings that ``compare`` takes as keywords."""

    lanes: int | None
    devices: int | None
    memory_limit: str | None
    checkpoint: int | None
    data: FederatedData | None


class OfRuns(OfComparisons, total=False):
    """The settings that ``simulate`` takes as keywords."""

    method: str | Method | Spec


def signed(keywords: type) -> Callable[[Called], Called]:
    """Show the settings in ``keywords`` as keyword parameters of a function in place of its ``**settings``."""

    def decorate(function: Called) -> Called:
        own = inspect.signature(function)
        types = {name: getattr(kind, "__forward_arg__", kind) for name, kind in keywords.__annotations__.items()}
        found = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
        order = sorted(types, key=[*DEFAULTS, "data"].index)
        found += [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=DEFAULTS.get(name), annotation=types[name])
            for name in order
        ]
        function.__signature__ = own.replace(parameters=found)  # type: ignore[attr-defined]
        return function

    return decorate
