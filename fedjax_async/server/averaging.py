"""Rules that step by a weighted mean or sum of deltas: FedAvg, FedNova, FedBuff, Pisces, FedAsync, ASGD and others."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_async.base import check, tree
from fedjax_async.base.factories import takes
from fedjax_async.server.aggregate import Aggregate, Sum, mean
from fedjax_async.server.rule import discount, guard_rails, rule
from fedjax_async.server.running_statistics import weights_of, with_statistics
from fedjax_async.server.transforms import Transform, Weight, scale_by_staleness, scaled, towards_client
from fedjax_async.types import Array, Arrival, Facts, Params, ServerAlgorithm, Traced


@takes(guards=guard_rails)
def fedavg(*, server_lr: Traced = 1.0, weighting: str = "examples", guards: Transform) -> ServerAlgorithm:
    """Mean of the deltas, by examples or uniform (McMahan et al. 2017).

    ``x <- x + eta_g sum_i p_i Delta_i``; ``p_i`` is proportional to the client's examples (``weighting="examples"``,
    Algorithm 1 of the paper) or uniform. ``server_lr`` is ``eta_g > 0``.
    """
    check.positive("server_lr", server_lr)
    return rule(guards, optimizer=optax.sgd(server_lr), weighting=weighting)


class Normalised(NamedTuple):
    """What :func:`normalised` accumulates."""

    total: Params  # sum of ``w_i d_i / tau_i``; of running statistics, sum of ``w_i d_i``
    steps: Array  # float[], sum of ``w_i tau_i``
    weight: Array  # float[], sum of ``w_i``


def normalised() -> Aggregate:
    """``tau_eff sum p_i d_i / tau_i``; ``tau_eff = sum p_i tau_i``, ``p_i = w_i / sum w_j``, ``tau_i`` local steps."""

    def init(params: Params) -> Normalised:
        zero = jnp.zeros((), jnp.result_type(float))
        return Normalised(jax.tree.map(jnp.zeros_like, tree.wide(params)), zero, zero)

    def add(accumulated: Normalised, direction: Params, share: Array, arrival: Arrival) -> Normalised:
        steps, direction = jnp.asarray(arrival.local_steps).astype(share.dtype), tree.wide(direction)
        part = with_statistics(weights_of(scaled(direction, share / steps)), scaled(direction, share))
        total = jax.tree.map(jnp.add, accumulated.total, part)
        return Normalised(total, accumulated.steps + share * steps, accumulated.weight + share)

    def close(accumulated: Normalised) -> tuple[Params, Array, Normalised]:
        total, steps, weight = accumulated
        below = jnp.where(weight > 0, weight, 1.0)
        average = scaled(total, 1.0 / below)
        direction = with_statistics(weights_of(scaled(average, steps / below)), average)
        return direction, weight, jax.tree.map(jnp.zeros_like, accumulated)

    return Aggregate(init, add, close)


@takes(guards=guard_rails)
def fednova(*, server_lr: Traced = 1.0, weighting: str = "examples", guards: Transform) -> ServerAlgorithm:
    """Mean of the deltas per local step, times the mean number of steps (Wang et al. 2020).

    ``x <- x + eta_g tau_eff sum_i p_i Delta_i / tau_i``, ``tau_eff = sum_i p_i tau_i``, with ``tau_i`` local steps of
    plain SGD: eq. 6 of "Tackling the objective inconsistency problem in heterogeneous federated optimization". Clients
    that take more local steps do not count for more. If all clients of a server step take equally many, it is FedAvg.
    Deviation: with a rate that falls within jobs (``decay=linear``) tau_i still is the number of steps, where the paper
    has the sum of their rates: clients that take fewer steps then count for more.

    Args:
      server_lr: ``eta_g > 0``.
      weighting: ``p_i`` by ``examples`` or ``uniform``.
    """
    check.positive("server_lr", server_lr)
    return rule(guards, optimizer=optax.sgd(server_lr), weighting=weighting, aggregate=normalised())


@takes(discounted=discount, guards=guard_rails)
def fedbuff(*, server_lr: Traced = 0.7, discounted: Weight, guards: Transform) -> ServerAlgorithm:
    """Mean of K staleness-weighted deltas (Nguyen et al. 2022).

    ``x <- x + eta_g (1/K) sum_{i in buffer} s(tau_i) Delta_i``, ``s = (1 + tau)^-0.5`` by default:
    Algorithm 1 of the paper. The timing ``buffer:size=K`` sets the size of the buffer.

    Defaults: K = 10 as in the paper, and the rate 0.7 of the authors' example (FLSim,
    ``examples/configs/sent140_fedbuff_config.json``, K = 10 too), without its momentum of 0.9 at the server, which the
    part ``momentum`` adds. The paper tunes the rate together with the clients' for each task. At rate 1 and with 100
    clients in flight the accuracy swings (``experiments/methods``).
    """
    check.positive("server_lr", server_lr)
    return rule(guards, scale_by_staleness(discounted), optimizer=optax.sgd(server_lr))


@takes(discounted=discount, guards=guard_rails)
def pisces(*, server_lr: Traced = 1.0, discounted: Weight, guards: Transform) -> ServerAlgorithm:
    """Mean of the staleness-weighted deltas of a server step, by examples (Pisces, Jiang et al. 2022).

    ``x <- x + eta sum_i (n_i / sum_j n_j) s(tau_i) Delta_i``, n_i examples, ``s = (1 + tau)^-0.5`` by default. The
    method's policy ``pisces`` chooses clients by their losses and their staleness, and its timing ``pace`` sets steps
    as far apart as the slowest client under way needs. Another policy replaces it: ``policy="uniform"`` chooses none.

    Args:
      server_lr: ``eta > 0``; 1 in the authors' code, which has none.

    Source: ``federated_averaging`` in the authors' code (``plato/servers/fedavg.py`` of github.com/SamuelGong/Pisces).
    """
    check.positive("server_lr", server_lr)
    return rule(guards, scale_by_staleness(discounted), optimizer=optax.sgd(server_lr), weighting="examples")


@takes(discounted=discount, guards=guard_rails)
def fedasync(*, mixing: Traced = 0.6, discounted: Weight, guards: Transform) -> ServerAlgorithm:
    """Mix each arriving model in, with a smaller weight if it is staler (Xie et al. 2019).

    ``x <- (1 - a_t) x + a_t x_i``, ``a_t = mixing * s(tau)``: Algorithm 1 of the paper. If a server step has several
    arrivals, their mixing steps are averaged. ``mixing`` is alpha in (0, 1]. The guard rails limit ``x_i - x``, the
    difference of the client's model from the server's.
    """
    check.positive("mixing", mixing)
    check.in_range("mixing", mixing, 0.0, 1.0)
    return rule(towards_client(), guards, scale_by_staleness(discounted, mixing), optimizer=optax.sgd(1.0))


@takes(guards=guard_rails)
def asgd(*, server_lr: Traced = 1.0, guards: Transform) -> ServerAlgorithm:
    """Add each arriving delta, ``x <- x + eta Delta_i`` (asynchronous SGD with local steps).

    ``server_lr`` is ``eta > 0``. If a server step has several arrivals, their deltas are averaged.

    With the timing ``fresh`` this is Ringmaster ASGD (method ``ringmaster``, ``fresh:threshold=R``) and Rennala SGD
    (``rennala``, ``fresh:size=K``), with deltas of local steps in place of stochastic gradients. Their default R and K
    of 10 are this project's: the papers choose them from the noise of the gradients and the accuracy that is wanted.
    """
    check.positive("server_lr", server_lr)
    return rule(guards, optimizer=optax.sgd(server_lr))


class OverClients(NamedTuple):
    """What :func:`over_clients` accumulates."""

    sum: Sum
    facts: Facts  # static


def over_clients() -> Aggregate:
    """``sum w_i d_i / N``, N all clients of the run."""
    plain = mean()

    def init(params: Params, facts: Facts = Facts()) -> OverClients:
        return OverClients(plain.init(params), facts.static)

    def add(accumulated: OverClients, direction: Params, share: Array, arrival: Arrival) -> OverClients:
        return accumulated._replace(sum=plain.add(accumulated.sum, direction, share, arrival))

    def close(accumulated: OverClients) -> tuple[Params, Array, OverClients]:
        direction, weight, emptied = mean(divisor=accumulated.facts.num_clients).close(accumulated.sum)
        return direction, weight, accumulated._replace(sum=emptied)

    return Aggregate(init, add, close, sums=True)


@takes(guards=guard_rails)
def asynfl(*, server_lr: Traced = 1.0, guards: Transform) -> ServerAlgorithm:
    """Sum of the deltas of a server step, divided by the number n of all clients (AsynFL 2025).

    ``x <- x + (eta_g / n) sum_{i in S_t} Delta_i``, where ``S_t`` are the clients of the server step. The sum is
    divided by n, not by ``|S_t|``, so a client that takes part more often counts more. With compressed uploads
    (``Delta_i`` after decoding) this is AsynFLC, with error feedback AsynFLC-EF. The timing decides when a
    step closes: ``window:length=W``, or ``participation``, which is exactly Algorithm 1 of the paper.

    Args:
      server_lr: ``eta_g > 0``.
    """
    check.positive("server_lr", server_lr)
    return rule(guards, optimizer=optax.sgd(server_lr), aggregate=over_clients())


@takes(discounted=discount, guards=guard_rails)
def fedcompass(*, server_lr: Traced = 0.9, discounted: Weight, guards: Transform) -> ServerAlgorithm:
    """Sum of a group's staleness-weighted deltas, divided by the number N of all clients (Li et al. 2024).

    ``x <- x + alpha (1/N) sum_{i in group} s(tau_i) Delta_i``, ``s = (1 + tau)^-0.5`` by default. The timing
    ``compass`` gives clients as many local steps as fit before their group arrives.

    Args:
      server_lr: ``alpha > 0``.

    Source: ``FedCompassAggregator`` in the authors' code (github.com/APPFL/APPFL) with uploads that are changes of the
    model, and the options of its example. Deviation: clients count equally there by default, here always.
    """
    check.positive("server_lr", server_lr)
    return rule(guards, scale_by_staleness(discounted), optimizer=optax.sgd(server_lr), aggregate=over_clients())
