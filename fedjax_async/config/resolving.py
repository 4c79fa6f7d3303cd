"""Complete the settings of a run, with or without a server: keywords, objects, derived defaults.

The last functions build the parts that both kinds of runs need: model, delay model, evaluations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_async.base import check, factories, inputs, registry
from fedjax_async.base.method import Method, ignored_by
from fedjax_async.clock import DELAYS, DelayModel, Until
from fedjax_async.config import concerns, contracts, misplaced, own, words
from fedjax_async.config.cautions import caution, caution_rate
from fedjax_async.config.clients import client_factory, leaves_out, usual_compression, usual_optimizer
from fedjax_async.config.fields import moments
from fedjax_async.config.inputs import with_files
from fedjax_async.config.methods import brings_timing, owner_of, usual_of
from fedjax_async.config.own import Chosen
from fedjax_async.config.peer_methods import sends_nothing
from fedjax_async.config.problem import (
    brings_client_tests,
    check_count,
    check_model,
    initial,
    model_of,
    params_dtype,
    usual_partition,
)
from fedjax_async.config.registries import REGISTRIES
from fedjax_async.config.settings import DEFAULTS, EVALUATIONS, Settings, fields_of, given_in
from fedjax_async.data import Dataset, Federation
from fedjax_async.engine.devices import require_backend, require_fits
from fedjax_async.engine.evaluation import Every
from fedjax_async.local import local_steps
from fedjax_async.models.personal import personal_paths, with_personal
from fedjax_async.types import ClientAlgorithm, FederatedData, Model, Params

# arguments of ``simulate`` and ``compare`` that are no settings
ARGUMENTS = ("out", "plots", "overwrite", "again", "probes", "progress", "callbacks", "stream", "keep_best")
OF_TABLES = ("baseline", "target", "final", "interval")  # arguments of ``results.comparison``
TEST_FRACTION = 0.2  # of each node's examples, without a server


def without_server(settings: Settings) -> bool:
    """Whether the method of the settings is decentralised."""
    return not usual_of(settings.method).has_server


def with_objects(settings: Settings, *, data: object = None, **objects: Any) -> Settings:
    """Replace the names of settings by the objects that are given; ``data`` becomes the setting ``dataset``.

    Raises ``ValueError`` unless ``data`` is ``FederatedData``.
    """
    kinds = (FederatedData, own.Named)
    allowed = "FederatedData; data.from_arrays(clients=[(x, y), ...], test=(x, y)) makes one from arrays"
    if isinstance(data, (Dataset, Federation)):
        allowed = "FederatedData; a Dataset or Federation is given as dataset="
    check.require(data is None or isinstance(data, kinds), "data", f"a {type(data).__name__}", allowed)
    given = {name: thing for name, thing in {**objects, "dataset": data}.items() if thing is not None}
    return dataclasses.replace(settings, **given) if given else settings


def settings_from(settings: Settings | None, changes: Mapping[str, Any]) -> Settings:
    """Change ``settings`` by keyword: fields by name, and ``data``, a ``FederatedData``.

    Raises ``ValueError`` for unknown names, and for keywords that exclude each other.
    """
    allowed = "Settings; a single setting is a keyword, as in simulate(method='fedavg', updates=100)"
    check.require(settings is None or isinstance(settings, Settings), "settings", settings, allowed)
    method = changes.get("method", Settings.method if settings is None else settings.method)
    for name in changes:
        if name not in KNOWN:
            _refuse_setting(name, changes[name], method, changes)
    fields = dict(changes)
    data = fields.pop("data", None)
    client = changes.get("client")
    if isinstance(client.thing if isinstance(client, own.Named) else client, ClientAlgorithm):
        concerns.refuse("own_client", fields)
    if isinstance(data, str):
        raise ValueError(f"data = {data!r}: must be FederatedData; a data set by its name is dataset={data!r}")
    if data is not None and "dataset" in fields:
        raise ValueError(f"dataset = {check.shown(fields['dataset'])}: must be left out: data are given")
    held = fields.get("dataset") if data is None else data
    given = held.thing if isinstance(held, own.Named) else held
    if isinstance(given, FederatedData) and "clients" in fields:
        check_count(fields["clients"], given)
    changed = Settings(**fields) if settings is None else dataclasses.replace(settings, **fields)
    return changed if data is None else with_objects(changed, data=data)


KNOWN = [*Settings.__dataclass_fields__, "data"]  # the keywords of a run that are settings


def _refuse_setting(name: str, value: object, method: object, given: Mapping[str, object]) -> None:
    """``ValueError`` for a name that is no setting; for an option of the method it says how to write the option.

    So it does for an option of another of the ``given`` settings, such as ``compress="topk", ratio=0.1``.
    """
    place = misplaced.in_others(REGISTRIES, given, name, str(value))
    if place is None and isinstance(method, str) and words.meant(name, KNOWN) is None:
        place = owner_of(method, name, str(value))
    where = "" if place is None else place.text(lambda setting, spec: f"{setting}={spec!r}")
    check.require(place is None, name, value, f"an option of {where}, not a setting")
    allowed = f"left out: tables have it, as in results.comparison(compare(...), {name}=...)"
    check.require(name not in OF_TABLES, name, value, allowed)
    allowed = "left out: a run has one seed; compare(methods, seeds=...) and sweep train several"
    check.require(name != "seeds", name, value, allowed)
    words.require("setting", name, [*KNOWN, *ARGUMENTS])


def resolved(settings: Settings) -> Settings:
    """Fill derived defaults: the partition from the data set; policy, compression, optimiser and rate from the method.

    Without a server also the topology and the test fraction. Optimiser and rate stay open if the factory of local
    training does not take them and the run has no fine-tuning or Ditto. The settings get the digests of their input
    files. ``ValueError`` for settings without effect, and for a file that has changed since a saved run began.
    """
    before = len(inputs.changed)
    found = with_files(_resolved(settings))
    return found if len(inputs.changed) == before else with_files(_resolved(settings))  # a file changed: read it anew


def _resolved(settings: Settings) -> Settings:
    usual = usual_of(settings.method)
    settings = dataclasses.replace(settings, policy=settings.policy or usual.policy)
    if settings.policy is not None:
        settings = with_evaluations(settings)
    concerns.refuse("server" if usual.has_server else "nodes", given_in(settings), method=str(settings.method))
    if settings.policy is not None:
        concerns.refuse("adaptive", given_in(settings))
    fill = usual_compression if usual.has_server else _usual_of_nodes
    filled = usual_partition(settings) | fill(settings, usual)
    factory, optimizer = client_factory(settings, usual), usual_optimizer(settings, usual)
    if settings.lr is not None and settings.optimizer is None and str(usual.optimizer).startswith("adam"):
        caution_rate(settings, usual)
    if factory is not None and settings.fine_tune is None and settings.ditto is None:
        for name in ignored_by(factories.options_of(factory)):
            optimizer.pop(name, None)
    return dataclasses.replace(settings, **filled, **optimizer)


def with_evaluations(s: Settings) -> Settings:
    """Fill in about 50 evaluations for a run with a policy, if the settings ask for none.

    Without a policy, evaluations are chosen after planning.
    """
    alone = s.time is not None and s.updates is None and s.server_steps is None
    if alone or any(getattr(s, name) is not None for name in EVALUATIONS):
        return s
    if s.time is not None:
        return dataclasses.replace(s, eval_time=s.time / 50)
    if s.updates is not None:
        return dataclasses.replace(s, eval_updates=-(-s.updates // 50))
    return dataclasses.replace(s, eval_steps=-(-int(s.server_steps or 0) // 50))


def _usual_of_nodes(s: Settings, usual: Method) -> dict[str, Any]:
    """Topology, compressor and test fraction of a run without a server, where they are left open.

    Nodes that send nothing have no topology.
    """
    allowed = f"left out: the method brings its own, {str(s.method).partition('@')[2]}"
    check.require(s.exchange is None or not brings_timing(s.method), "exchange", str(s.exchange), allowed)
    if usual.compress is None:
        allowed = f"left out: {s.method} has messages of its own"
        check.require(s.compress is None, "compress", str(s.compress), allowed)
    fraction = s.test_fraction
    if fraction is None and s.eval_examples is None and not brings_client_tests(s):
        fraction = TEST_FRACTION
    silent = sends_nothing(s.method, s.exchange)
    allowed = f"left out: the nodes of {s.method} send nothing" + (
        f" with exchange = {s.exchange}" if s.exchange else ""
    )
    check.require(s.topology is None or not silent, "topology", str(s.topology), allowed)
    compress, topology = s.compress or usual.compress, None if silent else s.topology or usual.topology
    return {"topology": topology, "compress": compress, "test_fraction": fraction}


def settings_in_comparison(common: Settings, method: Chosen, others: Collection[Chosen]) -> Settings:
    """The ``common`` settings for one method of a comparison with ``others``.

    Where methods with and without a server are compared, settings that only the other kind takes are left out, and all
    train and test on the same examples: ``test_fraction`` is 0.2 unless it is given. Nodes that send nothing have no
    topology. A timing or exchange in the method's spec replaces the common one.
    """
    peers = {name: not usual_of(name).has_server for name in (method, *others)}
    changes: dict[str, Any] = {"method": method}
    if brings_timing(method):
        changes["exchange" if peers[method] else "timing"] = None
    if len(set(peers.values())) == 2:
        changes |= {name: DEFAULTS[name] for name in concerns.without_effect("nodes" if peers[method] else "server")}
        if common.test_fraction is None and common.eval_examples is None and not brings_client_tests(common):
            changes["test_fraction"] = TEST_FRACTION
    nodes = [name for name in peers if peers[name]]
    silent = {name: sends_nothing(name, None if brings_timing(name) else common.exchange) for name in nodes}
    if silent.get(method) and not all(silent.values()):
        changes["topology"] = None
    return dataclasses.replace(common, **changes)


def checked(settings: Settings) -> Settings:
    """The settings with derived defaults.

    ``ValueError`` if JAX has no device, for own parts that are not loaded, and for float64 without 64-bit mode.
    """
    require_backend()
    if settings.compute == "float64" and jnp.result_type(float) != jnp.float64:
        raise ValueError(
            "compute = 'float64': must be run with JAX's 64-bit mode, jax.config.update('jax_enable_x64', True)"
        )
    for field, value in fields_of(settings).items():
        if isinstance(value, own.Named):
            own.thing_of(field, value)  # refuses own parts that are not loaded
    return resolved(settings)


def model_for(s: Settings, data: FederatedData) -> tuple[Model, Params]:
    """The checked model of a run on raw rows, and the shapes of its parameters."""
    model = model_of(s, data)
    if own.is_own(s, "model"):
        contracts.check_own_model(model, data)
    shapes, _ = initial(model.init, params_dtype(s.compute)).eval_shape(jax.random.key(s.seed))
    if s.personal is not None:
        model = with_personal(model, personal_paths(s.personal, shapes))
    check_model(model, shapes, data)
    require_fits(str(s.model), shapes)
    if model.train is not None or own.is_own(s, "model"):
        caution(s, model, data)
    check.optional(check.whole, "devices", s.devices, high=len(jax.devices()))
    return model, shapes


def length_of_batch(s: Settings, data: FederatedData) -> int:
    """Examples per minibatch: a batch larger than every client's data would only be padded."""
    return min(s.batch_size, int(data.size.max()))


def epochs_of(s: Settings) -> float | None:
    """Local epochs of a job; None where the settings count steps."""
    return 1.0 if s.epochs is None and s.steps is None else s.epochs


def steps_of(s: Settings, data: FederatedData, chosen: Method) -> np.ndarray:
    """Local steps of each client's job; int32[N]."""
    whole = leaves_out(s, chosen)
    return local_steps(data.size, batch_size=s.batch_size, epochs=epochs_of(s), steps=s.steps, whole_batches=whole)


def delay_of(s: Settings) -> DelayModel:
    """The delay model that the settings name, or their object."""
    if isinstance(s.delay, own.Named):
        return cast(DelayModel, own.thing_of("delay", s.delay))
    return cast(DelayModel, registry.spec("delay", DELAYS, s.delay).make())


def until_of(s: Settings) -> Until:
    """The budget that the settings give."""
    return Until(time=s.time, updates=s.updates, steps=s.server_steps)


def every_of(s: Settings) -> Every:
    """When the settings ask for evaluations."""
    return Every(s.eval_time, s.eval_updates, s.eval_steps, None if s.eval_at is None else moments(s.eval_at))
