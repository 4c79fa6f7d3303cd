"""AD-PSGD: nodes that average in pairs, and train meanwhile.

Source: Lian, Zhang, Zhang, Liu, "Asynchronous decentralized parallel stochastic gradient descent" (2018): its
introduction, and Algorithm 1 as several public codes have it, which agree on gradient, average and step in this order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_async.base import check, registry, tree
from fedjax_async.base.factories import takes
from fedjax_async.server.rule import guard_rails
from fedjax_async.server.transforms import Transform, begun, require_no_steps, scaled, stepped, transformed
from fedjax_async.types import (
    Array,
    Arrival,
    Facts,
    Info,
    Key,
    Message,
    Params,
    Request,
    ServerAlgorithm,
    State,
    Traced,
)

Draw = Callable[[Key, Array, int], Array]  # (key, node i, N) -> the node with which i averages; i itself: with none


def _complete(key: Key, node: Array, nodes: int) -> Array:
    """Any other node."""
    return (node + 1 + jax.random.randint(key, (), 0, max(nodes - 1, 1), jnp.int32)) % nodes


def _ring(key: Key, node: Array, nodes: int) -> Array:
    """The next or the previous one on a circle."""
    return (node + jnp.where(jax.random.bernoulli(key), 1, nodes - 1)) % nodes


def _bipartite(key: Key, node: Array, nodes: int) -> Array:
    """Any odd node, for an even one; an odd one draws none."""
    odd = 2 * jax.random.randint(key, (), 0, max(nodes // 2, 1), jnp.int32) + 1
    return jnp.where((node % 2 == 0) & (odd < nodes), odd, node)


_PAIR = 0xAD  # folded into an arrival's key
PAIRINGS: dict[str, Draw] = {"complete": _complete, "ring": _ring, "bipartite": _bipartite}


class NodeModels(NamedTuple):
    """The models of all nodes."""

    models: Params  # [N, ...]
    guards: State
    facts: Facts  # static


@takes(guards=guard_rails)
def adpsgd(*, server_lr: Traced = 1.0, pairing: str = "complete", guards: Transform) -> ServerAlgorithm:
    """Nodes without a server average in pairs; the mean of their models is evaluated (AD-PSGD, Lian et al. 2018).

    When node i is done with its job, it draws a neighbour j: ``x_i, x_j <- (x_i + x_j) / 2``, and then ``x_i <- x_i +
    eta Delta_i``, where ``Delta_i`` was computed at the model that the node had when the job began. Other nodes may
    have averaged with it in the meantime. It starts again from ``x_i``.

    Args:
      server_lr: ``eta > 0``.
      pairing: neighbours: ``complete`` (any other node), ``ring`` (two of them), ``bipartite`` (as the paper has it
        against deadlocks: even nodes draw an odd one, odd nodes wait to be drawn).

    The global model is the mean of all models, which averaging does not change. Each node has a model of its own: the
    setting ``per_client`` evaluates them.

    What is simulated, and what is not: the clock orders the events, so that an average is never interrupted and nothing
    can wait in a circle; the pairing changes who averages, not whether it works. Averages take no time of their own, as
    in the paper, where they run beside the training. A job's message and its upload count as the two models of its
    exchange, one each way; under ``bipartite``, jobs of odd nodes count them too, though their nodes exchange nothing.
    Timing ``every`` is the paper's; with another one averages are as here, at each arrival.

    Deviations: clients take local steps, and the delta is in place of the gradient. A rejected upload averages nothing.
    The neighbour's running statistics are averaged, and node i then has those that it trained. Memory: N models.
    """
    check.positive("server_lr", server_lr)
    neighbour = registry.find("pairing", PAIRINGS, pairing)
    require_no_steps(guards, "adpsgd")

    def init(params: Params, facts: Facts = Facts()) -> tuple[NodeModels, Array]:
        count = facts.num_clients
        models = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[None], (count, *leaf.shape)), params)
        # The memory has no content. It declares that each client has a message of its own.
        return NodeModels(models, begun(guards, params, facts), facts.static), jnp.zeros((), jnp.int32)

    def receive(state: NodeModels, memory: Array, arrival: Arrival) -> tuple[NodeModels, Array, Info]:
        node = arrival.client
        drawn = neighbour(jax.random.fold_in(arrival.key, _PAIR), node, state.facts.num_clients)
        own, its = tree.read_rows(state.models, node), tree.read_rows(state.models, drawn)
        middle = jax.tree.map(lambda a, b: scaled(a + b, 0.5), own, its)
        result = transformed(guards, state.guards, middle, arrival)
        after = stepped(middle, result.direction, server_lr)
        models = tree.scatter(state.models, drawn, tree.where(result.accepted, middle, its))
        models = tree.scatter(models, node, tree.where(result.accepted, after, own))
        limits = tree.where(result.accepted, result.state, state.guards)
        new = state._replace(models=models, guards=limits)
        return new, memory, result.info(result.accepted.astype(result.arrival.weight.dtype))

    def dispatch(state: NodeModels, memory: Array, request: Request) -> tuple[Message, Array]:
        return Message(tree.gather(state.models, request.client)), memory

    def params(state: NodeModels) -> Params:
        return jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), state.models)

    return ServerAlgorithm(init, receive, dispatch, params)
