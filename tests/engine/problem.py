"""A small problem in JAX's default float type: a softmax MLP on Gaussian blobs, clients of unequal sizes.

Also a rule and a client that are in no registry, and how runs are stacked, compared, ended on their way, and executed
as on an accelerator.
"""

from __future__ import annotations

import functools
import sys
from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_async.base import factories, tree
from fedjax_async.clock import Until, plan
from fedjax_async.engine import Components, Every, evaluation_points
from fedjax_async.engine.stacking import layout_of, make_member, make_stack, shape_of
from fedjax_async.local import OPTIMIZERS, batches, local_steps, local_training
from fedjax_async.models.wrap import augmented, cross_entropy
from fedjax_async.server import METHODS, SERVERS
from fedjax_async.types import ClientAlgorithm, FederatedData, Info, Message, Model, ServerAlgorithm

FEATURES, HIDDEN, CLASSES = 5, 7, 3
SIZES = (9, 4, 13, 6, 1)


def identity(x):
    return x


@functools.cache
def data(sizes: tuple[int, ...] = SIZES) -> FederatedData:
    rng = np.random.default_rng(7)
    size = np.array(sizes, np.int32)
    total = int(size.sum())
    y = rng.integers(0, CLASSES, total + 20).astype(np.int32)
    x = rng.normal(size=(total + 20, FEATURES)) + 1.5 * np.eye(CLASSES, FEATURES)[y]
    order = rng.permutation(total).astype(np.int32)
    offset = np.concatenate([[0], np.cumsum(size)[:-1]]).astype(np.int32)
    return FederatedData(
        "blobs", x[:total], y[:total], order, offset, size, x[total:], y[total:], identity, CLASSES,
        np.arange(20, dtype=np.int32), np.arange(len(size), dtype=np.int32) * (20 // len(size)),
        np.full(len(size), 20 // len(size), np.int32),
    )  # fmt: skip


@jax.jit
def _init(key):
    """Two layers with three tensors in total: more leaves would make every program larger."""
    a, b = jax.random.split(key)
    return {
        "hidden": {"kernel": 0.5 * jax.random.normal(a, (FEATURES, HIDDEN))},
        "output": {"kernel": 0.5 * jax.random.normal(b, (HIDDEN, CLASSES)), "bias": jnp.zeros(CLASSES)},
    }


def _apply(params, x, key=None):
    x = x.astype(params["hidden"]["kernel"].dtype)
    h = jnp.tanh(x @ params["hidden"]["kernel"])
    return h @ params["output"]["kernel"] + params["output"]["bias"][None]


MODEL = Model(_init, _apply, cross_entropy)


@functools.cache
def server(name: str, **options):
    return SERVERS[name](**options)


@functools.cache
def client(proximal: float = 0.0, batch_size: int = 4, lr: float = 0.1):
    return local_training(MODEL, optimizer=optax.sgd(lr, momentum=0.5), batch_size=batch_size, proximal=proximal)


@functools.cache
def noisy_client():
    """``client()`` with augmented inputs: random noise is added in every local step."""
    model = augmented(MODEL, lambda key, x: x + 0.3 * jax.random.normal(key, x.shape, x.dtype))
    return local_training(model, optimizer=optax.sgd(0.1, momentum=0.5), batch_size=4)


@functools.cache
def client_of(rule: str):
    """The local training that belongs to a rule."""
    made = (METHODS[rule].client if rule in METHODS else None) or local_training
    if made is local_training:
        return client()
    optimizer = OPTIMIZERS[METHODS[rule].optimizer](0.1)
    options = {"lr": 0.1, "optimizer": optimizer, "alpha": 0.5, "batch_size": 4, "proximal": METHODS[rule].proximal}
    options["control_lr"] = 0.05
    return made(MODEL, **{key: options[key] for key in options if key in factories.options_of(made)})


class Case(NamedTuple):
    """The arguments of both engines, in order."""

    components: Components
    schedule: object
    params: object
    key: object
    points: object


def case(
    rule, timing="every", delay="exponential", *, proximal=0.0, updates=24, seed=3, every=None, epochs=2.0, steps=None,
    sizes=SIZES, **conditions,
) -> Case:  # fmt: skip
    """The arguments of one run; call it inside ``jax.enable_x64`` for float64."""
    who = data(sizes)
    trainer = client(proximal) if proximal else client_of(rule) if isinstance(rule, str) else client()
    rule = server(rule) if isinstance(rule, str) else rule
    schedule = plan(
        timing,
        delay,
        num_clients=len(who.size),
        local_steps=local_steps(who.size, batch_size=4, epochs=None if steps else epochs, steps=steps),
        until=Until(updates=updates),
        seed=seed,
        bytes_down=1000,
        bytes_up=1000,
        **conditions,
    )
    points = evaluation_points(schedule, every or Every(updates=5))
    params = MODEL.init(jax.random.key(1))
    return Case(Components(rule, trainer, MODEL, who), schedule, params, jax.random.key(2), points)


def changed(given, **components):
    """The case with other components."""
    return given._replace(components=given.components._replace(**components))


@functools.cache
def remembering() -> ServerAlgorithm:
    """A server with a row of memory about each client (its last upload) and personal messages."""

    def init(params):
        return {"x": params, "count": jnp.int32(0)}, jax.tree.map(jnp.zeros_like, params)

    def receive(state, memory, arrival):
        x = jax.tree.map(lambda x, d, h: x + 0.3 * (d - 0.5 * h), state["x"], arrival.upload, memory)
        kept = tree.where(arrival.weight > 0, arrival.upload, memory)
        return {"x": x, "count": state["count"] + 1}, kept, Info(arrival.weight, {"count": state["count"]})

    def dispatch(state, memory, request):
        sent = jax.tree.map(lambda x, h: x + 0.25 * h, state["x"], memory)
        return Message(sent, extra=tree.norm(memory)), jax.tree.map(lambda h: 0.9 * h, memory)

    return ServerAlgorithm(init, receive, dispatch, lambda state: state["x"])


@functools.cache
def carrying(base: ClientAlgorithm) -> ClientAlgorithm:
    """A client with state between jobs: it adds half of its last upload to the next one, and counts its jobs."""

    def init(params):
        return jax.tree.map(jnp.zeros_like, params), jnp.int32(0)

    def begin(key, message, state, data):
        return base.begin(key, message, (), data)

    def finish(work, message, state):
        upload, _ = base.finish(work, message, ())
        upload = jax.tree.map(lambda u, e: u + 0.5 * e, upload, state[0])
        return upload, (upload, state[1] + 1)

    return ClientAlgorithm(init, begin, base.step, finish)


def personal(timing="every", delay="exponential:mean=1", who=None, **options) -> Case:
    """A server with memory and personal messages, and clients with state, which also train in vain."""
    return changed(case(remembering(), timing, delay, **options), client=carrying(who or client()))


def stack_of(*cases, facts=None, of_stack=None, **layout):
    """Runs side by side: ``facts`` has further keywords of each run's member, ``of_stack`` of the stack."""
    members = [make_member(*one, **more) for one, more in zip(cases, facts or [{}] * len(cases), strict=True)]
    made = layout_of(members, **layout)
    return make_stack(members, made, shape_of(made), **(of_stack or {}))


@contextmanager
def on_an_accelerator():
    """Inside, the engine runs as on an accelerator, but for the permutation, which XLA:CPU cannot compile unrolled."""

    def backend():
        return "cpu" if sys._getframe(1).f_globals["__name__"] == batches.__name__ else "gpu"

    with mock.patch.object(jax, "default_backend", backend):
        yield


class Killed(Exception):
    """Raised by the progress callback to simulate a kill."""


def killer(at):
    """A progress callback that ends the run after so many updates."""

    def progress(done, total, **status):
        if done >= at:
            raise Killed

    return progress


def close(a, b, rtol):
    """Assert that two trees are equal up to ``rtol`` relative to the largest entry of each leaf of ``b``."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=0, atol=rtol * max(np.abs(y).max(), 1e-3))


def near(have, want, rtol=1e-9, atol=1e-12):
    """Assert that two tables have the same columns, and about the same values."""
    assert have.keys() == want.keys()
    for name, values in want.items():
        np.testing.assert_allclose(have[name], values, rtol=rtol, atol=atol, err_msg=name)


def same(a, b):
    """Assert that two trees are equal to the last bit."""
    jax.tree.map(np.testing.assert_array_equal, a, b)
