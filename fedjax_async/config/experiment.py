"""From settings to a finished run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_async import check, registry, tree
from fedjax_async.clock import DELAYS, TIMINGS, Limits, Timing, Until, plan
from fedjax_async.config.methods import Method, method, preset_of
from fedjax_async.config.named_data import data_of, with_owners
from fedjax_async.config.settings import Settings, as_dict
from fedjax_async.config.uploads import compressing, traffic_of, with_uploads
from fedjax_async.engine.checkpoint import Keeper
from fedjax_async.engine.evaluation import Every, Points, evaluation_points, owners
from fedjax_async.engine.memory import parse_size
from fedjax_async.engine.pieces import ClientFamily, Hyper, Pieces, bound, row_of, rule_of, split_options
from fedjax_async.engine.probes import NO_PROBES, Probes, columns_of, resolved_probes
from fedjax_async.engine.record import Traffic, make_run
from fedjax_async.engine.reference import run_reference
from fedjax_async.engine.run import Progress, run_waves
from fedjax_async.engine.storage import client_restoring, probe_restoring, server_storing
from fedjax_async.local import DECAYS, OPTIMIZERS, local_steps
from fedjax_async.models import MODELS, decoded, in_dtype, rematerialised
from fedjax_async.server import check_capacity
from fedjax_async.types import (
    ClientAlgorithm,
    ClientData,
    Facts,
    FederatedData,
    Key,
    Message,
    Model,
    Params,
    Request,
    Run,
    Schedule,
)

ENGINES = {"waves": run_waves, "reference": run_reference}


class Experiment(NamedTuple):
    """A run that is ready to start: nothing has been compiled or trained yet."""

    settings: Settings
    described: dict[str, Any]  # the settings as results keep them: names of objects replaced
    pieces: Pieces
    schedule: Schedule
    params: Params
    key: Key
    points: Points
    traffic: Traffic
    norm_limit: float = math.inf
    probes: Probes = NO_PROBES


# Equal specs give the same objects, so that runs that share pieces share compiled programs.
_method = lru_cache(maxsize=64)(method)


def resolved(settings: Settings) -> Settings:
    """The settings with what follows filled in: from their data set whose the examples are, from the method uploads."""
    return with_uploads(with_owners(settings), preset_of(settings.method))


@lru_cache(maxsize=16)
def _model(spec: str, input_shape: tuple[int, ...], num_classes: int | None) -> Model:
    return registry.bind("model", MODELS, spec, input_shape=input_shape, num_classes=num_classes)()


@lru_cache(maxsize=64)
def _ready(model: Model, decode: Any, compute: str, remat: bool) -> Model:
    """The model on raw rows, computing in the dtype asked for."""
    ready = decoded(model if compute == "float32" else in_dtype(model, jnp.dtype(compute)), decode)
    return rematerialised(ready) if remat else ready


@lru_cache(maxsize=64)
def _family(
    model: Model,
    client: Callable[..., ClientAlgorithm],
    options: tuple[tuple[str, Any], ...],
    optimizer: str,
    static: tuple[tuple[str, Any], ...],
    decay: str,
    batch_size: int,
) -> ClientFamily:
    """Local training by the factory ``client`` as a function of all that is traced: the learning rate and more."""
    scale = registry.bind("decay", DECAYS, decay)()
    takes = registry.options_of(client)

    def numbers(hyper: Hyper, prefix: str) -> dict[str, Any]:
        return {name.removeprefix(prefix): v for name, v in hyper.items() if name.startswith(prefix)}

    def family(hyper: Hyper) -> ClientAlgorithm:
        given = {
            "optimizer": OPTIMIZERS[optimizer](hyper["lr"], **dict(static), **numbers(hyper, "optimizer.")),
            "lr": hyper["lr"],
            "batch_size": batch_size,
            "proximal": hyper.get("proximal", 0.0),
            "scale": scale,
        }
        own = dict(options) | numbers(hyper, "client.")
        return client(model, **{name: value for name, value in given.items() if name in takes}, **own)

    return family


def _client(model: Model, s: Settings, batch_size: int, chosen: Method) -> tuple[ClientFamily, dict[str, float]]:
    """The family of the settings' and the method's local training, and which member of it."""
    registry.bind("optimizer", OPTIMIZERS, s.optimizer)(s.lr)  # checks names and ranges
    name, options = registry.parse_spec("optimizer", s.optimizer)
    static, traced = split_options(OPTIMIZERS[name], options)
    plain = name == "sgd" and not traced and dict(static).get("weight_decay", 0.0) == 0
    check.require(
        plain or not chosen.plain_sgd, "optimizer", s.optimizer, "sgd without options: the method is made for plain SGD"
    )
    family = _family(model, chosen.client, chosen.client_options, name, static, s.decay, batch_size)
    proximal = float(chosen.proximal)
    hyper = {f"optimizer.{option}": value for option, value in traced.items()} | {"lr": float(s.lr)}
    return family, hyper | ({"proximal": proximal} if proximal else {})


def input_shape(data: FederatedData) -> tuple[int, ...]:
    """Shape of one decoded example."""
    return jax.eval_shape(data.decode, row_of(data.x)).shape[1:]


def prepare(
    settings: Settings,
    *,
    method: Method | None = None,
    model: Model | None = None,
    data: FederatedData | None = None,
    client: ClientAlgorithm | None = None,
    probes: Mapping[str, Any] | None = None,
) -> Experiment:
    """Resolve every name and plan the whole run; ``ValueError`` for anything out of range.

    Objects given here take the place of the settings' names: a ``Method`` (server rule, timing,
    proximal weight), a ``Model`` of decoded inputs, ``FederatedData``, a ``ClientAlgorithm``. The last
    trains on raw rows (give it ``models.decoded(model, data.decode)``) and brings its own optimiser,
    minibatches and proximal term; the settings' ``batch_size`` then only counts its local steps. Its uploads are
    compressed like any other's where the settings or the method say so.

    ``probes``: by name, functions to evaluate on arrivals, or each a :class:`Probe` that says on which.
    """
    s = settings if data is not None else with_owners(settings)
    kinds = {"method": (method, Method), "model": (model, Model), "data": (data, FederatedData)}
    for name, (given, kind) in (kinds | {"client": (client, ClientAlgorithm)}).items():
        check.require(given is None or isinstance(given, kind), name, given, f"a name or a {kind.__name__}")
    if s.compute == "float64" and jnp.result_type(float) != jnp.float64:
        raise ValueError(
            "compute = 'float64': must be run with JAX's 64-bit mode, jax.config.update('jax_enable_x64', True)"
        )
    chosen = method if method is not None else _method(s.method)
    s = with_uploads(s, chosen)
    described = as_dict(s) | {
        name: "(object)"
        for name, given in (("method", method), ("model", model), ("optimizer", client))
        if given is not None
    }
    if client is not None:
        described |= {"lr": None, "decay": None}
    if data is not None:
        described |= {"dataset": data.name, "partition": "(object)", "clients": len(data.size)}
    # a method's own "@timing" is more particular than the run's
    spec = chosen.timing if method is None and "@" in s.method else s.timing or chosen.timing
    timing = registry.bind("timing", TIMINGS, spec)()
    data = data_of(s, data)
    if method is None:
        chosen = _method(s.method, len(data.size))
    if model is None:
        model = _model(s.model, input_shape(data), data.num_classes)
    model = _ready(model, data.decode, s.compute, s.remat)
    initial = _initial(model, s.compute)
    root = jax.random.key(s.seed)
    shapes, _ = jax.eval_shape(initial, root)
    _check_model(model, shapes, data)
    trainer: ClientAlgorithm | ClientFamily
    if client is None:
        # no client fills a longer batch, so a shorter one does the same
        batch_size = min(s.batch_size, int(data.size.max()))
        trainer, hyper = _client(model, s, batch_size, chosen)
    else:
        trainer, hyper = client, {}
    epochs = 1.0 if s.epochs is None and s.steps is None else s.epochs
    steps = local_steps(data.size, batch_size=s.batch_size, epochs=epochs, steps=s.steps)

    message, upload = _sent(chosen, trainer, hyper, model, shapes, data)
    trainer, numbers = compressing(trainer, s, model.private, upload)
    traffic = traffic_of(
        tree.shared((message.params, message.extra), shapes, model.private),
        tree.shared(upload, shapes, model.private),
        s,
    )
    schedule, points = _planned(s, timing, data, steps, traffic)
    if s.per_client:
        owners(data)
    check_capacity(jax.eval_shape(lambda p: bound(chosen.server, chosen.hyper).init(p)[0], shapes), schedule)
    server = chosen.server
    pieces = Pieces(server, trainer, model, data, {**chosen.hyper, **hyper, **numbers})
    watched = resolved_probes(probes, data, len(schedule.job))
    columns_of(watched, pieces, shapes)
    params, key = initial(root)
    if s.slots != "full":
        server, trainer = server_storing(server, s.slots), client_restoring(trainer, _real(s.compute))
        pieces = pieces._replace(server=server, client=trainer)
        watched = {name: probe_restoring(probe, _real(s.compute)) for name, probe in watched.items()}
    limit = math.inf if s.norm_limit is None else s.norm_limit
    return Experiment(s, described, pieces, schedule, params, key, points, traffic, limit, watched)


def _sent(
    chosen: Method,
    trainer: ClientAlgorithm | ClientFamily,
    hyper: Hyper,
    model: Model,
    params: Params,
    data: FederatedData,
) -> tuple[Message, Any]:
    """Shapes of a message and of an (uncompressed) upload; ``params``: shapes too."""
    rule = rule_of(chosen.server, chosen.hyper, Facts(len(data.size)))

    def both(params: Params, key: Key, pool: tuple[Any, Any]) -> tuple[Message, Any]:
        message, _ = rule.dispatch(*rule.init(params), Request())
        message = message._replace(version=jnp.int32(0))
        client = bound(trainer, {**chosen.hyper, **hyper})
        state, zero = client.init(params), jnp.int32(0)
        own = ClientData(*pool, jnp.zeros(1, jnp.int32), zero, zero + 1)
        return message, client.finish(client.begin(key, message, state, own), message, state)[0]

    pool = (row_of(data.x), row_of(data.y))
    found: tuple[Message, Any] = jax.eval_shape(both, params, jax.random.key(0), pool)
    return found


def _planned(
    s: Settings, timing: Timing, data: FederatedData, steps: np.ndarray, traffic: Traffic
) -> tuple[Schedule, Points]:
    """The schedule, and where to evaluate; ``steps``: a job of each client, int[N]."""
    schedule = plan(
        timing,
        registry.bind("delay", DELAYS, s.delay)(),
        num_clients=len(data.size),
        local_steps=steps,
        until=Until(time=s.time, updates=s.updates, steps=s.server_steps),
        seed=s.seed,
        bytes_down=traffic.down,
        bytes_up=traffic.up,
        availability=s.availability,
        faults=s.faults,
        network=s.network,
        limits=Limits(s.max_staleness, s.timeout, s.late),
    )
    every = Every(time=s.eval_time, updates=s.eval_updates, steps=s.eval_steps, at=_moments(s.eval_at))
    spent = len(schedule.job) == s.updates or int(schedule.closes.sum()) == s.server_steps
    return schedule, evaluation_points(schedule, every, horizon=None if spent else s.time)


def _real(compute: str) -> str:
    """The dtype of the parameters, whatever the local steps compute in."""
    return "float64" if compute == "float64" else "float32"


def _moments(text: str | None) -> list[float] | None:
    """``"100,500"`` -> [100.0, 500.0]."""
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"eval_at = {text!r}: must be virtual seconds joined by commas, such as 100,500") from None


def _check_model(model: Model, params: Params, data: FederatedData) -> None:
    """The model must have one output a class, and keep some but not all of its leaves private."""
    if model.private is not None:
        paths = [tree.path_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
        kept = [path for path in paths if model.private(path)]
        check.require(
            0 < len(kept) < len(paths), "model.private", f"{len(kept)} of {len(paths)} leaves", "some of them"
        )
    outputs = jax.eval_shape(model.apply, params, row_of(data.x))
    if data.num_classes is not None:
        classes = outputs.shape[-1]
        check.require(
            classes == data.num_classes, "model outputs", classes, f"{data.num_classes}, one a class of {data.name}"
        )


@lru_cache(maxsize=64)
def _initial(model: Model, compute: str) -> Any:
    """Jitted ``root -> (params, key of the run)``."""

    def initial(root: Key) -> tuple[Params, Key]:
        init_key, run_key = jax.random.split(root)
        params = model.init(init_key)
        if _real(compute) == "float64":
            params = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), params)
        return params, run_key

    return jax.jit(initial)


def execute(experiment: Experiment, *, progress: Progress | None = None, checkpoints: Path | None = None) -> Run:
    """Run a prepared experiment on the engine that its settings name.

    ``checkpoints``: the folder in which the wave engine keeps checkpoints, if the settings ask for
    them, and from whose newest it goes on.
    """
    e, s = experiment, experiment.settings
    options: dict[str, Any] = {}
    if s.engine == "waves":
        options = {"max_width": s.max_width, "lanes": s.lanes, "batching": s.batching, "devices": s.devices}
        options["memory_limit"] = None if s.memory_limit is None else parse_size("memory_limit", s.memory_limit)
        if s.checkpoint is not None:
            if checkpoints is None:
                raise ValueError(
                    f"checkpoint = {s.checkpoint}: must be left out without a folder (--out) to keep it in"
                )
            check.require(jax.process_count() == 1, "checkpoint", s.checkpoint, "left out with several processes")
            options["keeper"] = Keeper(checkpoints, s.checkpoint, {"settings": e.described})
    outcome = ENGINES[s.engine](
        e.pieces,
        e.schedule,
        e.params,
        e.key,
        e.points,
        per_client=s.per_client,
        on_bad=s.on_bad,
        norm_limit=e.norm_limit,
        probes=e.probes,
        progress=progress,
        **options,
    )
    return make_run(e.described, e.schedule, e.points, outcome, e.traffic)


def simulate(
    settings: Settings | None = None,
    *,
    progress: Progress | None = None,
    **changes: Any,
) -> Run:
    """Simulate one asynchronous (or synchronous) federated run.

    Every field of :class:`Settings` is a keyword; ``method``, ``model``, ``data`` and ``client`` may
    be objects instead of names. ``probes``: see :func:`prepare`; what they return is in ``Run.probes``.

    >>> run = simulate(method="fedbuff", dataset="fashion_mnist_6k", model="logistic", clients=4, updates=6)
    >>> run.counters["updates"]
    6

    Raises: ``ValueError`` naming field, value and range, before anything is compiled.
    """
    given = {}
    for name in ("method", "model", "data", "client", "probes"):
        if name in changes and not isinstance(changes[name], str):
            given[name] = changes.pop(name)
    base = as_dict(settings) if settings is not None else {}
    unknown = [name for name in changes if name not in Settings.__dataclass_fields__]
    for name in unknown:
        registry.find("setting", Settings.__dataclass_fields__, name)
    return execute(prepare(Settings(**(base | changes)), **given), progress=progress)
