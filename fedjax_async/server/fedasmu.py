"""FedASMU: a weight of each client's models that is learned, and clients that take in a fresh model in mid-job.

Source: Liu et al., "FedASMU: efficient asynchronous federated learning with dynamic staleness-aware model update"
(AAAI 2024), eqs. 1-3 and 7-9. Its text was not at hand: the equations are those in which two public codes that number
them agree (1 and 2), and one of them (7 and 8); eqs. 3 and 9 are gradient steps, whose gradients follow by the chain
rule.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_async.base import check, tree
from fedjax_async.base.factories import takes
from fedjax_async.geometry.vectors import inner as inner_product
from fedjax_async.geometry.vectors import leaves
from fedjax_async.local import Blend, Scale, going_on, local_training
from fedjax_async.server.aggregate import Sum, mean
from fedjax_async.server.rule import guard_rails
from fedjax_async.server.running_statistics import weights_of
from fedjax_async.server.transforms import (
    Transform,
    begun,
    chain,
    require_no_steps,
    scaled,
    towards_client,
    transformed,
)
from fedjax_async.types import (
    Array,
    Arrival,
    ClientAlgorithm,
    Facts,
    Info,
    Message,
    Model,
    Params,
    Request,
    ServerAlgorithm,
    State,
    Traced,
)


class Learned(NamedTuple):
    """The server's row about one client."""

    level: Array  # float[], lambda
    power: Array  # float[], sigma
    floor: Array  # float[], iota
    towards: Params  # from the server's model to that of the client at its last accepted upload, of the weights alone
    step: Array  # float[], t of that upload
    age: Array  # float[], its age
    known: Array  # bool[], whether there was one


class FedAsmuState(NamedTuple):
    """Server state."""

    params: Params
    mixed: Sum  # mixing steps since the last server step
    step: Array  # int32[], server steps closed
    guards: State


def weight_of(own: Learned, step: Array, age: Array, strength: Traced) -> tuple[Array, Array]:
    """``alpha = mu xi / (1 + mu xi)`` with ``xi = lambda / (sqrt(t) age^sigma) + iota``, and its slope in xi."""
    mu = jnp.asarray(strength, step.dtype)
    below = 1.0 + mu * (own.level / (jnp.sqrt(step) * age**own.power) + own.floor)
    return 1.0 - 1.0 / below, mu / below**2


def learned(own: Learned, slope: Array, strength: Traced, rate: Traced) -> Learned:
    """Step lambda, sigma and iota against their gradients; ``slope``: of the client's loss in its last weight."""
    _, steep = weight_of(own, own.step, own.age, strength)
    scale = 1.0 / (jnp.sqrt(own.step) * own.age**own.power)
    step = jnp.where(own.known, _step(slope * steep, rate), 0.0)
    return own._replace(
        level=_within(own.level - step * scale),
        power=_within(own.power + step * own.level * scale * jnp.log(own.age)),
        floor=_within(own.floor - step),
    )


def _step(gradient: Array, rate: Traced) -> Array:
    """``rate`` times the gradient, or 0 where it has overflowed."""
    return jnp.where(jnp.isfinite(gradient), jnp.asarray(rate, gradient.dtype) * gradient, 0.0)


def _within(number: Array) -> Array:
    """A learned number, kept from 0 to 1e6, so that weights stay in [0, 1) and finite."""
    return jnp.clip(number, 0.0, 1e6)


@takes(guards=guard_rails)
def fedasmu(
    *,
    strength: Traced = 1.0,
    level: Traced = 1.0,
    power: Traced = 0.5,
    floor: Traced = 0.0,
    rate: Traced = 0.01,
    guards: Transform,
) -> ServerAlgorithm:
    """Mix each arriving model in, by a weight that is learned for each client (FedASMU, Liu et al. 2024).

    ``x <- (1 - alpha) x + alpha w_i``, ``alpha = mu xi / (1 + mu xi)``, ``xi = lambda_i / (sqrt(t) (t - o + 1)^sigma_i)
    + iota_i`` (eqs. 1 and 2), t the number of the server step, o that of the client's message. Before an upload is
    mixed in, lambda_i, sigma_i and iota_i take a step against the gradient of the client's loss (eq. 3). Its slope in
    the last weight is ``<grad F_i, w_i' - x'>``, with the client's last model and the model into which it was mixed;
    the gradient is the negative of the delta that arrives now. The three stay between 0 and 1e6.

    Clients are :func:`fedasmu_client`, the timing is ``midway``.

    Args:
      strength: ``mu > 0``.
      level, power, floor: lambda, sigma and iota at first; > 0, >= 0 and >= 0. The defaults are this project's.
      rate: of eq. 3, >= 0, the same for all three; 0 learns nothing. It stands for ``eta / (eta_i L)``: a delta is a
        gradient times the client's rate and its number of local steps.

    Deviations: the age counts from the message that the client got last, which with ``midway`` is the second one. The
    delta stands for the gradient at the model right after the client's last upload. If a server step has several
    arrivals, their mixing steps are averaged. Memory: D scalars a client.
    """
    for name, value in (("strength", strength), ("level", level)):
        check.positive(name, value)
    for name, value in (("power", power), ("floor", floor), ("rate", rate)):
        check.non_negative(name, value)
    require_no_steps(guards, "fedasmu")
    limits, average = chain(towards_client(), guards), mean()

    def init(params: Params, facts: Facts = Facts()) -> tuple[FedAsmuState, Learned]:
        real = jnp.result_type(float)
        first, second, third = (jnp.asarray(value, real) for value in (level, power, floor))
        one, zero = jnp.ones((), real), jax.tree.map(jnp.zeros_like, weights_of(params))
        row = Learned(first, second, third, zero, one, one, jnp.zeros((), jnp.bool_))
        return FedAsmuState(params, average.init(params), jnp.int32(0), begun(limits, params, facts)), row

    def receive(state: FedAsmuState, memory: Learned, arrival: Arrival) -> tuple[FedAsmuState, Learned, Info]:
        result = transformed(limits, state.guards, state.params, arrival)
        accepted, share = result.accepted, result.accepted.astype(result.arrival.weight.dtype)
        slope = -inner_product(leaves(weights_of(arrival.upload)), leaves(memory.towards))
        own = learned(memory, slope, strength, rate)
        step, age = ((each + 1).astype(own.level.dtype) for each in (state.step, arrival.staleness))
        alpha, _ = weight_of(own, step, age, strength)
        direction = scaled(result.direction, alpha)
        new = state._replace(
            mixed=average.add(state.mixed, direction, share, arrival),
            guards=tree.where(accepted, result.state, state.guards),
        )
        towards = weights_of(result.direction)
        row = own._replace(towards=towards, step=step, age=age, known=jnp.ones_like(memory.known))
        return new, tree.where(accepted, row, memory), result.info(share * alpha.astype(share.dtype))

    def close(state: FedAsmuState, memory: Learned) -> tuple[FedAsmuState, Learned]:
        change, came, emptied = average.close(state.mixed)
        moved = tree.where(came > 0, jax.tree.map(jnp.add, state.params, change), state.params)
        return state._replace(params=moved, mixed=emptied, step=state.step + 1), memory

    def dispatch(state: FedAsmuState, memory: Learned, request: Request) -> tuple[Message, Learned]:
        return Message(state.params), memory

    return ServerAlgorithm(init, receive, dispatch, lambda state: state.params, close)


# --- the client ---------------------------------------------------------------------------------


class Taking(NamedTuple):
    """What a client learns about the models that it gets in mid-job."""

    level: Array  # float[], gamma
    factor: Array  # float[], upsilon


def learned_share(*, strength: Traced, level: Traced, factor: Traced, rate: Traced) -> Blend:
    """``beta = mu phi / (1 + mu phi)``, ``phi = gamma / sqrt(g) (1 - upsilon / sqrt(g - o + 1))``, at least 0.

    g and o are one more than the server steps closed before the fresh model and before the job's first. The share is 0
    if the fresh model is the first one.
    """

    def parts(own: Taking, began: Array, now: Array) -> tuple[Array, Array, Array]:
        """``1 / sqrt(g)``, ``1 / sqrt(g - o + 1)`` and phi."""
        real = own.level.dtype
        late, fresh = ((each + 1).astype(real) ** -0.5 for each in (now, now - began))
        return late, fresh, jnp.maximum(own.level * late * (1.0 - own.factor * fresh), 0.0)

    def init() -> Taking:
        return Taking(*(jnp.asarray(value, jnp.result_type(float)) for value in (level, factor)))

    def weight(own: Taking, began: Array, now: Array) -> Array:
        strong = jnp.asarray(strength, own.level.dtype) * parts(own, began, now)[-1]
        return jnp.where(now > began, 1.0 - 1.0 / (1.0 + strong), 0.0)

    def after(own: Taking, began: Array, now: Array, slope: Array) -> Taking:
        late, fresh, phi = parts(own, began, now)
        mu = jnp.asarray(strength, phi.dtype)
        moves = (now > began) & (phi > 0)
        step = jnp.where(moves, _step(slope * mu / (1.0 + mu * phi) ** 2, rate), 0.0)
        return Taking(
            _within(own.level - step * late * (1.0 - own.factor * fresh)),
            _within(own.factor + step * own.level * late * fresh),
        )

    return Blend(init, weight, after)


def fedasmu_client(
    model: Model,
    *,
    optimizer: optax.GradientTransformation,
    batch_size: int = 32,
    proximal: Traced = 0.0,
    scale: Scale = None,
    take_strength: Traced = 1.0,
    take_level: Traced = 1.0,
    take_factor: Traced = 0.5,
    take_rate: Traced = 0.01,
) -> ClientAlgorithm:
    """Local training that mixes a fresh global model into its own in mid-job; uploads the model delta.

    ``w <- (1 - beta) w + beta x_g`` (eq. 7) with the weight of :func:`learned_share` (eq. 8): the more server steps the
    fresh model is ahead, the larger. After the job gamma and upsilon take a step against the gradient of the loss
    (eq. 9): the slope in beta is ``<grad F, x_g - w>``, with the change of the second part in place of the gradient.

    Options: ``take_strength`` mu > 0; ``take_level`` gamma > 0 and ``take_factor`` upsilon >= 0 at first; ``take_rate``
    >= 0 of eq. 9, which stands for ``eta / (eta_i L)``. The defaults are this project's. The other options are those of
    ``local_training``.

    Left out: the moment of the second message is chosen by reinforcement learning in the paper; here the timing
    ``midway`` has it after a fixed share of the steps. The message takes no time.
    """
    check.positive("take_strength", take_strength)
    check.positive("take_level", take_level)
    check.non_negative("take_factor", take_factor)
    check.non_negative("take_rate", take_rate)
    plain = local_training(model, optimizer=optimizer, batch_size=batch_size, proximal=proximal, scale=scale)
    blend = learned_share(strength=take_strength, level=take_level, factor=take_factor, rate=take_rate)
    return going_on(plain, blend)
