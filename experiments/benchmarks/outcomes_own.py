"""Parts of a user's own for the cases of ``outcomes.py``: objects, registered names, a plugin, input files.

They use the public interface only.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import fedjax_async
from fedjax_async import (
    Info,
    Message,
    Method,
    ServerAlgorithm,
    clock,
    compress,
    data,
    local,
    models,
    peers,
    register,
    server,
)
from fedjax_async.peers import PeerAlgorithm
from fedjax_async.types import Traced

RNG = np.random.default_rng(0)
Y = np.arange(150) % 3
X = (RNG.normal(size=(150, 5)) + 1.5 * np.eye(3, 5)[Y]).astype(np.float32)
PARTS = [(X[i : i + 15], Y[i : i + 15]) for i in range(0, 150, 15)]
DEALT = data.from_arrays(PARTS[:6], test=(X[90:], Y[90:]), name="dealt")
DEALT_WITH_TESTS = data.from_arrays(PARTS[:5], client_tests=PARTS[5:], name="with_tests")
START = {"output": {"kernel": np.full((6, 3), 0.1, np.float32), "bias": np.zeros(3, np.float32)}}
NET = nn.Sequential([nn.Dense(6), nn.tanh, nn.Dense(3)])


class Conv(nn.Module):
    """A tiny network for images."""

    @nn.compact
    def __call__(self, x):
        """Logits of images [B, 28, 28, 1]."""
        x = nn.relu(nn.Conv(2, (5, 5), strides=(4, 4))(x))
        return nn.Dense(10, name="output")(x.reshape(len(x), -1))


def halving() -> ServerAlgorithm:
    """Half of each delta; the updates so far are a column."""

    def receive(state: Any, memory: Any, arrival: Any) -> Any:
        used = arrival.weight > 0
        arrival = server.rebased(arrival, state["w"])
        moved = jax.tree.map(lambda w, delta: w + 0.5 * delta, state["w"], arrival.upload)
        return {"w": moved, "count": state["count"] + used}, memory, Info(arrival.weight, {"count": state["count"]})

    return ServerAlgorithm(
        init=lambda params: ({"w": params, "count": jnp.int32(0)}, ()),
        receive=receive,
        dispatch=lambda state, memory, request: (Message(state["w"]), memory),
        params=lambda state: state["w"],
    )


# Where ``takes`` is: now, and in two earlier versions.
_ROOMS = ("base.factories", "factories", "registry")
_FILES = [Path(fedjax_async.__file__).parent / f"{room.replace('.', '/')}.py" for room in _ROOMS]
_ROOM = next(room for room, file in zip(_ROOMS, _FILES) if file.is_file())
TAKES = importlib.import_module(f"fedjax_async.{_ROOM}").takes
# A version before ``Spec`` has functions of ``hyper`` in its place, and a class of its own for methods of nodes.
SPEC = getattr(fedjax_async, "Spec", None)
OF_NODES = getattr(fedjax_async, "PeerMethod", Method)


def with_server(server_lr: float, pull: float) -> Any:
    """FedBuff with clients that are pulled to the model they received; both numbers may vary."""
    if SPEC is not None:
        return Method(SPEC(server.fedbuff, server_lr=server_lr), client=SPEC(pulled, pull=pull))
    hyper = {"server_lr": server_lr, "client.pull": pull}
    return Method(lambda hyper: server.fedbuff(server_lr=hyper["server_lr"]), hyper=hyper, client=pulled)  # type: ignore[call-arg]


def of_nodes(step: float) -> Any:
    """Nodes that move a part of the way to what they received, a number that may vary."""
    if SPEC is not None:
        return Method(SPEC(_part_way, step=step), exchange="mean")
    return OF_NODES(lambda hyper: node(hyper["step"]), exchange="mean", hyper={"step": step})


def _part_way(stays: Any, *, step: Traced = 0.5) -> PeerAlgorithm:
    del stays
    return node(step)


def pulled(model: Any, *, lr: Any, batch_size: int, pull: Traced = 0.1) -> Any:
    """SGD on the loss plus ``pull / 2 |w - received|^2``."""

    def correct(gradient: Any, weights: Any, message: Any) -> Any:
        return jax.tree.map(lambda g, w, start: g + pull * (w - start), gradient, weights, message.params)

    return local.local_training(model, optimizer=optax.sgd(lr), batch_size=batch_size, correct=correct)


def client_of_dealt() -> Any:
    """A ``ClientAlgorithm`` for the rows of ``DEALT``."""
    model = models.from_flax(NET, input_shape=(5,))
    return local.local_training(models.decoded(model, data.decode.as_is), optimizer=optax.sgd(0.2), batch_size=4)


def rush_hour(num_clients: int, seed: int) -> clock.Delays:
    """A job takes a minute, a client's every third job five minutes."""

    def durations(clients: Any, numbers: Any, local_steps: Any, bytes_down: Any, bytes_up: Any) -> np.ndarray:
        clients, numbers = np.broadcast_arrays(clients, numbers)
        return np.where(numbers % 3 == 2, 300.0, 60.0 + seed + clients)

    return clock.Delays(num_clients, durations)


def by_twos(scenario: Any) -> Any:
    """A server step every two arrivals, at most four jobs in flight."""
    return clock.TIMINGS["buffer"](size=2, concurrency=4)(scenario)


def dealt_in_turn(labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Clients with as many examples, drawn at random."""
    return list(np.array_split(rng.permutation(len(labels)), num_clients))


def halves() -> Any:
    """Every entry in half of its bits."""

    def shorten(key: Any, x: Any) -> Any:
        del key
        return compress.Dense(x.astype(jnp.float16))

    return compress.Compressor(shorten, lambda payload: payload.values.astype(jnp.float32), compress.bits)


def margin(outputs: Any, y: Any) -> Any:
    """The largest output less that of the label."""
    return outputs.max(-1) - jnp.take_along_axis(outputs, y[:, None], -1)[:, 0]


def lossy_first(prior: Any) -> clock.Policy:
    """The clients of the highest losses."""
    del prior

    def choose(view: Any, idle: Any, count: int) -> clock.Choice:
        losses = view.losses(idle)
        highest = np.argsort(-losses, kind="stable")[:count]
        return clock.Choice(idle[highest], losses[highest])

    return clock.Policy(choose=choose)


def turns(num_clients: int, seed: int) -> Any:
    """A ring and a star in turn."""
    graphs: Any = peers if hasattr(peers, "TOPOLOGIES") else clock  # where an earlier version had them
    made = [graphs.TOPOLOGIES[name]()(num_clients, seed) for name in ("ring", "star")]
    return graphs.Topology(num_clients, tuple(topology.graphs[0] for topology in made))


def node(step: Any) -> PeerAlgorithm:
    """Each event moves the model a part of the way to the received models, trains it, and sends it."""

    def push(row: Any, upload: Any, event: Any) -> Any:
        del event
        row = jax.tree.map(lambda w, change: w + change, row, upload)
        return row, jax.tree.map(lambda w: w[None], row), {"step": jnp.float32(step)}

    return PeerAlgorithm(
        init=lambda params: params,
        open=lambda row: jax.tree.map(jnp.zeros_like, row),
        add=lambda inbox, row, message, weight: jax.tree.map(
            lambda total, w, other: total + weight * (other - w), inbox, row, message
        ),
        wake=lambda row, inbox, event: jax.tree.map(lambda w, change: w + step * change, row, inbox),
        start=Message,
        push=push,
        params=lambda row: row,
    )


@register("method", "fair", timing="buffer:size=2")
@TAKES(guards=server.guard_rails)
def fair(*, guards: Any, limit: Traced = 4.0, server_lr: Traced = 0.5) -> Any:
    """An update weighs by the steps since its client's last one."""
    weight = server.scale_by_staleness(lambda tau: jnp.minimum(limit, (1 + tau) / 4))
    return server.rule(guards, weight, optimizer=optax.sgd(server_lr))


@register("part", "shrunk")
def shrunk(*, factor: Traced = 0.5) -> Any:
    """Shorter server steps."""
    return server.Part(step=optax.scale(factor))


@register("delay", "tides")
def tides(*, mean: float = 1.0, by: float = 2.0) -> Any:
    """Every second job takes ``by`` times as long."""

    def model(num_clients: int, seed: int) -> clock.Delays:
        def durations(clients: Any, numbers: Any, *sizes: Any) -> np.ndarray:
            draws = clock.Draws(seed, "tides", clients, numbers).random()
            return np.asarray(mean * (0.5 + draws) * np.where(np.asarray(numbers) % 2 == 1, by, 1.0))

        return clock.Delays(num_clients, durations)

    return model


@register("client", "pulling")
def pulling(model: Any, *, lr: Any, batch_size: int, pull: Traced = 0.2) -> Any:
    """:func:`pulled` by name."""
    return pulled(model, lr=lr, batch_size=batch_size, pull=pull)


@register("optimizer", "clipped")
def clipped(lr: Any, *, norm: float = 1.0) -> Any:
    """SGD with short gradients."""
    return optax.chain(optax.clip_by_global_norm(norm), optax.sgd(lr))


@register("model", "narrow")
def narrow(*, num_classes: int, input_shape: tuple[int, ...], width: int = 4) -> Any:
    """One hidden layer."""
    return models.make(f"mlp:hidden={width}", num_classes=num_classes, input_shape=input_shape)


@register("policy", "patient")
def patient(*, every: int = 1) -> Any:
    """The clients that were idle first, looked at seldom."""

    def model(prior: Any) -> clock.Policy:
        del prior
        return clock.Policy(
            choose=lambda view, idle, count: clock.Choice(np.sort(idle)[:count], np.zeros(count)), every=every
        )

    return model


@register("dataset", "blobs")
def blobs(*, size: int = 120, classes: int = 3) -> Any:
    """A Gaussian blob for each class."""
    rng = np.random.default_rng(size)
    y = rng.integers(classes, size=size)
    x = (2 * np.eye(classes)[y] + rng.normal(size=(size, classes))).astype(np.float32)
    return data.Dataset("blobs", x[40:], y[40:], test_x=x[:40], test_y=y[:40])


def synthetic(clients: int) -> str:
    """A small data set with an owner for each example."""
    return f"synthetic:clients={clients},features=6,classes=3,least_size=12,mean_log_size=2,std_log_size=0.5"


PLUGIN = '''"""A plugin: a method without a server, and a decay."""

import jax

from fedjax_async import Message, register
from fedjax_async.peers import PeerAlgorithm


@register("method", "gossiping", exchange="mean", topology="ring")
def gossiping(stays, *, step: float = 0.5):
    """A part of the way to the received models."""
    add = lambda inbox, row, message, weight: jax.tree.map(
        lambda total, w, other: total + weight * (other - w), inbox, row, message
    )

    def push(row, upload, event):
        row = jax.tree.map(lambda w, change: w + change, row, upload)
        return row, jax.tree.map(lambda w: w[None], row), {}

    return PeerAlgorithm(
        init=lambda params: params,
        open=lambda row: jax.tree.map(lambda w: 0 * w, row),
        add=add,
        wake=lambda row, inbox, event: jax.tree.map(lambda w, change: w + step * change, row, inbox),
        start=Message,
        push=push,
        params=lambda row: row,
    )


@register("decay", "steps_down")
def steps_down(*, factor: float = 0.5, every: int = 4):
    """A factor every few server steps."""
    return lambda version: factor ** (version // every)
'''


SWEEP = f"""seeds = 2

[base]
method = "fedbuff"
model = "logistic"
dataset = "{synthetic(6)}"
clients = 6
updates = 12
validation_fraction = 0.2

[grid]
timing = ["buffer:size=2", "buffer:size=3"]
lr = [0.05, 0.1]
"""


def write_inputs(folder: Path) -> None:
    """The input files that the cases name."""
    texts = {
        "plugin.py": PLUGIN,
        "delays.csv": "client,mean,std\n" + "".join(f"{i},{1 + i / 4},{0.2}\n" for i in range(8)),
        "mixing.toml": SWEEP,
        "graph.csv": "source,target\n" + "".join(f"{i},{(i + k) % 6}\n" for i in range(6) for k in (1, 2)),
        "links.csv": "source,target,rate,latency\n"
        + "".join(f"{i},{j},{1000 + 100 * i},0.1\n" for i in range(6) for j in range(i)),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
