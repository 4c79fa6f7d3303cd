"""Conservatism of the clients' real local training.

A client's job maps the weights of the message to the weights after K local steps. Its minibatches are fixed by the
job's key, so the map V is a function, and ``I - V`` is its part of FedAvg's server field (eq. 2). :func:`training_curl`
measures the relative antisymmetry of the Jacobians of ``I - V`` for the client algorithm of a run, and
:func:`curl_probe` does so along a run. One job is linearised at a time, and only a few directions are stored.

For SGD at learning rate gamma, with Hessian H_i of the i-th minibatch, the leading terms are
``J - J' = gamma^2 sum_{i<j} (H_i H_j - H_j H_i)`` and ``J + J' = 2 gamma sum_i H_i``. So the relative antisymmetry
grows linearly in gamma, and it is 0 for one step. If all minibatches are the same (the whole shard), the first order
vanishes: the antisymmetry then grows with gamma^2, and is 0 for a quadratic loss.

Source: Charles and Rush (2022), section 2; the measurement and the orders in gamma are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_async.base import check
from fedjax_async.config.methods import method_of
from fedjax_async.config.prepared import WITH_SERVER, Experiment
from fedjax_async.config.resolving import steps_of
from fedjax_async.engine.components import bound, facts_of
from fedjax_async.local import job_key
from fedjax_async.local.feedback import Sending
from fedjax_async.server import begun
from fedjax_async.server.running_statistics import weights_of, with_statistics
from fedjax_async.theory.vector_fields import Field, MeanCurl, estimate_mean_curl
from fedjax_async.types import (
    Array,
    Arrival,
    ClientAlgorithm,
    ClientData,
    DataParts,
    Key,
    Message,
    Params,
    Request,
    State,
    Whole,
)

_DIRECTIONS = 0xD12  # folded into the key of an arrival; server rules fold other numbers into it
Curl = Callable[[State, State, Arrival, DataParts], dict[str, Array]]


def local_displacement(
    client: ClientAlgorithm, key: Key, message: Message, data: ClientData, steps: Whole, *, longest: int | None = None
) -> Field:
    """``x -> x - V(x)`` of one job: minus the change of the weights x of a message by local training, as in eq. 2.

    The function is differentiable forward and backward, unlike ``local.run_job``, whose loop has no fixed length.

    Args:
      client: its upload must have the structure of the message's params (a change of the weights).
      key: of the job, ``local.job_key``; it fixes minibatches and dropout.
      message: its params are replaced by x, except for running statistics; the client starts with a fresh state.
      data: the client's examples.
      steps: K, local steps of the job; int32[] with ``longest``, else a whole number.
      longest: the most steps of any job.

    Raises: ``ValueError`` for other uploads, such as curves and compressed ones.
    """
    even = longest is None
    most = int(steps) if longest is None else longest
    check.whole("steps", most)

    def field(x: Params) -> Params:
        sent = message._replace(params=with_statistics(x, message.params), local_steps=jnp.asarray(steps, jnp.int32))
        kept = client.init(sent.params)

        def step(work: State, k: Array) -> tuple[State, None]:
            if even:
                return client.step(work, k, sent, data), None
            return jax.lax.cond(k < steps, lambda w: client.step(w, k, sent, data), lambda w: w, work), None

        numbers = jnp.arange(most, dtype=jnp.int32)
        work, _ = jax.lax.scan(step, client.begin(key, sent, kept, data), numbers)
        upload, _ = client.finish(work, sent, kept)
        found, wanted = (str(jax.tree.structure(each)) for each in (upload, sent.params))
        check.require(found == wanted, "upload", found, "a change of the message's params")
        nodes = jax.tree.leaves(kept, is_leaf=lambda node: isinstance(node, Sending))
        compressed = any(isinstance(node, Sending) for node in nodes)
        check.require(not compressed, "upload", "compressed", "a change of the weights: prepare without compress")
        return jax.tree.map(jnp.negative, weights_of(upload))

    return field


def training_curl(
    key: Key,
    experiment: Experiment,
    params: Params | None = None,
    *,
    clients: Sequence[int] | None = None,
    pairs: int = 8,
    number: int = 0,
    weighting: str = "examples",
) -> MeanCurl:
    """Relative antisymmetry of each client's local training and of the server field, their mean, at ``params``.

    Local training is that of ``config.prepare(settings)``: its client algorithm, model, data, minibatches and numbers
    of local steps. Per client it costs one linearisation of a job and ``pairs`` forward and backward derivatives.

    Args:
      key: of the random directions.
      params: by default the first params of the experiment.
      clients: C clients, by default all.
      pairs: random pairs, at least 2.
      number: minibatches and local steps are those of each client's job with this number; the steps are those of the
        settings where the plan has no such job.
      weighting: of the clients in the mean: by ``examples``, or ``uniform`` as in eq. 2.

    Returns: NumPy arrays; ``parts`` has one entry a client.

    Raises: ``ValueError`` for streamed data, and for uploads that are not a change of the weights.
    """
    jobs = _Jobs(experiment, clients, number, weighting)
    data = experiment.components.data
    check.require(not data.streamed, "dataset", data.name, "one that fits into memory")
    params = experiment.params if params is None else params
    pool = jax.device_put((data.x, data.y, data.order))

    def measured(key: Key, params: Params, pool: tuple[Array, Array, Array]) -> MeanCurl:
        rule = bound(experiment.components.rule, experiment.components.hyper)
        message, _ = rule.dispatch(*begun(rule, params, facts_of(experiment.schedule)), Request())
        return jobs.curl(key, message._replace(params=params, version=jnp.int32(0)), pool, pairs)

    found: MeanCurl = jax.tree.map(np.asarray, jax.jit(measured)(key, params, pool))
    return found


def curl_probe(
    experiment: Experiment,
    *,
    clients: Sequence[int] | None = None,
    pairs: int = 4,
    number: int = 0,
    weighting: str = "examples",
) -> Curl:
    """A probe of :func:`training_curl` at the server's model; give it in ``probes`` of ``simulate``.

    Columns: ``server`` and ``server_error``, the relative antisymmetry of the server field and its standard error;
    ``clients``, the mean over the clients of their relative antisymmetry. The field is the same all along a run: its
    minibatches are those of the jobs with this ``number``, so the values change with the model only. Directions are new
    at each arrival, also of clients that arrive at once. The other content of a message (``extra``) is the arrival's.

    Args: ``experiment`` is ``config.prepare`` of the settings of the run; the others as in :func:`training_curl`.
    """
    check.whole("pairs", pairs, 2)
    jobs = _Jobs(experiment, clients, number, weighting)
    rule = bound(experiment.components.rule, experiment.components.hyper)

    def probe(state: State, memory: State, arrival: Arrival, parts: DataParts) -> dict[str, Array]:
        message = Message(rule.params(state), arrival.extra, jnp.int32(0))
        key = jax.random.fold_in(arrival.key, _DIRECTIONS)
        found = jobs.curl(key, message, (parts.train.x, parts.train.y, parts.train.order), pairs)
        return {
            "server": found.mean.value,
            "server_error": found.mean.standard_error,
            "clients": found.parts.value.mean(),
        }

    return probe


class _Jobs:
    """One job of each of some clients of an experiment."""

    def __init__(self, experiment: Experiment, clients: Sequence[int] | None, number: int, weighting: str) -> None:
        allowed = "that of a method with a server, from config.prepare(settings)"
        check.kind("experiment", experiment, Experiment, allowed)
        check.require(experiment.kind is WITH_SERVER, "experiment", experiment.settings.method, allowed)
        s, data = experiment.settings, experiment.components.data
        check.whole("number", number, 0)
        check.one_of("weighting", weighting, ("examples", "uniform"))
        chosen = list(range(len(data.size)) if clients is None else clients)
        check.require(len(chosen) > 0, "clients", chosen, "at least one client, or None for all")
        for one in chosen:
            check.whole("clients", one, 0, len(data.size) - 1)
        self.key, self.number = experiment.key, number
        self.client = bound(experiment.components.client, experiment.components.hyper)
        self.chosen = np.asarray(chosen, np.int32)
        steps = steps_of(s, data, method_of(s.method))
        jobs = np.flatnonzero(experiment.schedule.number == number)
        steps[experiment.schedule.client[jobs]] = experiment.schedule.local_steps[jobs]  # some timings set their own
        self.offset, self.size, self.steps = (a[self.chosen] for a in (data.offset, data.size, steps))
        self.weights = self.size.astype(float) if weighting == "examples" else np.ones(len(chosen))

    def curl(self, key: Key, message: Message, pool: tuple[Array, Array, Array], pairs: int) -> MeanCurl:
        """Relative antisymmetry of each client's map and of their mean, at the weights of the message."""
        chosen, offset, size, steps = (jnp.asarray(a) for a in (self.chosen, self.offset, self.size, self.steps))
        even = bool((self.steps == self.steps[0]).all())

        def field(i: Array, x: Params) -> Params:
            data = ClientData(*pool, offset[i], size[i])
            own = job_key(self.key, chosen[i], jnp.int32(self.number))
            length = (int(self.steps[0]), None) if even else (steps[i], int(self.steps.max()))
            return local_displacement(self.client, own, message, data, length[0], longest=length[1])(x)

        weights = jnp.asarray(self.weights / self.weights.sum(), jnp.result_type(float))
        return estimate_mean_curl(key, field, weights, weights_of(message.params), pairs=pairs)
