"""Privacy by name: clipped and noised uploads around any rule, DP-SGD in the clients, sums of secure aggregation.

``PRIVACY`` names the parts, which :func:`combined` joins. :func:`private` is the wrapper around a rule. What a run
guarantees is counted by ``results.privacy``.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_async.base import check, tree
from fedjax_async.local.dp_sgd import DPSGDOptions
from fedjax_async.server.rule import closed
from fedjax_async.server.transforms import begun
from fedjax_async.types import (
    Array,
    Arrival,
    Facts,
    Info,
    Key,
    Message,
    Number,
    Params,
    Path,
    Request,
    ServerAlgorithm,
    State,
    Traced,
    Tree,
)

LEAST_NOISE = 1e-6  # below it, float32 loses the noise beside an upload


class Uploads(NamedTuple):
    """Options of :func:`dp`."""

    clip: Number
    noise: Number
    quantile: Number | None
    rate: Number
    count_noise: Number | None


class Privacy(NamedTuple):
    """What protects a run; ``None``: nothing of this kind."""

    uploads: Uploads | None = None
    examples: DPSGDOptions | None = None
    least: int | None = None  # the fewest uploads of a sum that the server may see


def dp(
    *,
    clip: Traced = 1.0,
    noise: Traced = 1.0,
    quantile: Traced | None = None,
    rate: Traced = 0.2,
    count_noise: Traced | None = None,
) -> Privacy:
    """Clients' uploads are clipped, and noise is added by a server that is trusted with them.

    ``Delta <- Delta min(1, C / ||Delta||)``, with the norm over the whole upload. The noise has the standard deviation
    ``z C``. If the rule uses uploads only through the sum of a server step (``ServerAlgorithm.sums``), the sum has this
    noise: each of its K or more uploads gets ``z C / sqrt(K)``. For any other rule each upload gets ``z C``.
    Clipping and noise come after compression. Uploads with running statistics (BatchNorm) are refused if there is
    noise: variances would become negative. Source: McMahan et al. (2018), Algorithm 1.

    With ``quantile`` gamma the clip adapts (Andrew et al. 2021, Algorithm 1): when a step closes,
    ``C <- C exp(-rate (b - gamma))``, where b is the share of its uploads within the clip. The number of these uploads
    has noise ``count_noise`` (sigma_b). Uploads and number together have the noise multiplier z: the uploads get
    ``(z^-2 - (2 sigma_b)^-2)^(-1/2)``.

    Args:
      clip: C > 0, a Euclidean norm; with ``quantile`` its first value.
      noise: z, 0 or at least 1e-6; 0 only clips.
      quantile: gamma between 0 and 1; ``none`` keeps C.
      rate: eta_C > 0.
      count_noise: sigma_b > z / 2; by default the larger of z and K / 20.
    """
    check.positive("clip", clip)
    _require_noise(noise)
    if quantile is not None:
        check.positive("quantile", quantile)
        check.below_one("quantile", quantile)
    check.positive("rate", rate)
    check.require(quantile is not None or count_noise is None, "count_noise", count_noise, "left out without quantile")
    if isinstance(count_noise, numbers.Real) and isinstance(noise, numbers.Real):
        enough = check.is_real(count_noise) and float(count_noise) > float(noise) / 2
        check.require(enough, "count_noise", count_noise, f"above noise / 2 = {float(noise) / 2:g}")
    return Privacy(uploads=Uploads(clip, noise, quantile, rate, count_noise))


def dp_sgd(*, clip: Traced = 1.0, noise: Traced = 1.0) -> Privacy:
    """Clients clip the gradient of every example, and add noise to each sum of a minibatch (DP-SGD, Abadi et al. 2016).

    It protects single examples, against the server too.

    Args:
      clip: C > 0, bound of the norm of an example's gradient.
      noise: z, 0 or at least 1e-6; the sum gets noise of the standard deviation ``z C``.
    """
    check.positive("clip", clip)
    _require_noise(noise)
    return Privacy(examples=DPSGDOptions(clip, noise))


def _require_noise(noise: Number) -> None:
    check.non_negative("noise", noise)
    if isinstance(noise, numbers.Real):
        check.require(noise == 0 or float(noise) >= LEAST_NOISE, "noise", noise, f"0, or at least {LEAST_NOISE:g}")


def secure(*, size: int = 10) -> Privacy:
    """Secure aggregation: the server sees nothing but sums of at least ``size`` uploads.

    A run is refused if a part of it needs single uploads (rule, delay correction, norm limit, probe, the server's
    estimates of ``feedback=ef21``), if it gives stale uploads the weight 0 (``overstale_after``, ``late=drop``; the
    setting ``max_staleness`` drops them before they count), or if a server step may have fewer uploads. Uploads that
    are not finite are rejected, which no plan foresees: a run warns of sums that had fewer for this reason.
    The protocol itself is not simulated: bytes and seconds are those of uploads without keys and masks, and a masked
    upload would not be shorter for having few entries or levels.
    """
    check.whole("size", size, low=2)
    return Privacy(least=size)


PRIVACY: dict[str, Callable[..., Privacy]] = {"dp": dp, "dp_sgd": dp_sgd, "secure": secure}


PARTS_FOR = {"uploads": "parts for uploads", "examples": "parts for gradients", "least": "parts for secure sums"}


def combined(parts: Iterable[Privacy]) -> Privacy:
    """All parts together. Raises ``ValueError`` for two parts of the same kind."""
    found: dict[str, Any] = {}
    for part in parts:
        for name, value in part._asdict().items():
            if value is not None:
                check.require(name not in found, PARTS_FOR[name], 2, "at most one of a kind")
                found[name] = value
    return Privacy(**found)


# --- around a rule ------------------------------------------------------------------------------


class Clip(NamedTuple):
    """State of an adaptive clip."""

    norm: Array  # float[], C
    below: Array  # float[], number of uploads within C since the last server step, with noise
    uploads: Array  # float[], accepted uploads since then


class PrivateState(NamedTuple):
    """Server state of :func:`private`."""

    inner: State  # of the wrapped rule
    clip: Any  # Clip; () if it does not adapt


def differentially_private(
    rule: ServerAlgorithm,
    *,
    clip: Number,
    deviation: Number = 0.0,
    quantile: Number | None = None,
    rate: Number = 0.2,
    count_deviation: Number = 0.0,
    stays: Callable[[Path], bool] | None = None,
) -> ServerAlgorithm:
    """``rule`` on clipped uploads with Gaussian noise, drawn from the key of the arrival; see :func:`dp`.

    Rejected uploads stay zeros. The run records ``clip`` (C) and ``clipped`` (1 if the upload was shortened); its
    ``upload_norm`` is the norm before clipping, without running statistics.

    Args:
      deviation: standard deviation of each upload's noise, as a multiple of the clip.
      quantile, rate: of an adaptive clip.
      count_deviation: standard deviation of the noise that each upload adds to the number of uploads within the clip.
      stays: whether the leaf at a path is private and not uploaded.
    """
    real = jnp.result_type(float)
    adapts, noisy = quantile is not None, not (isinstance(deviation, numbers.Real) and deviation == 0)

    def init(params: Params, facts: Facts = Facts()) -> tuple[PrivateState, State]:
        state, memory = begun(rule, params, facts)
        zero = jnp.zeros((), real)
        return PrivateState(state, Clip(jnp.asarray(clip, real), zero, zero) if adapts else ()), memory

    def receive(state: PrivateState, memory: State, arrival: Arrival) -> tuple[PrivateState, State, Info]:
        bound = state.clip.norm if adapts else jnp.asarray(clip, real)
        sent = tree.shared(arrival.upload, arrival.start, stays)
        norm = tree.norm(sent)
        noise = jnp.asarray(deviation, real) * bound if noisy else None
        shorter = clipped(sent, norm, bound)
        changed = shorter if noise is None else noised(arrival.key, shorter, noise)
        accepted = arrival.weight > 0
        upload = tree.join(tree.where(accepted, changed, sent), arrival.upload)
        inner, memory, info = rule.receive(state.inner, memory, arrival._replace(upload=upload))
        after = PrivateState(inner, state.clip)
        if adapts:
            counts = (info.weight > 0).astype(real)
            share = (norm <= bound).astype(real)
            if noisy:
                draw = jax.random.normal(jax.random.fold_in(arrival.key, 1), (), real)
                share = share + jnp.asarray(count_deviation, real) * draw
            seen = state.clip
            after = PrivateState(inner, seen._replace(below=seen.below + counts * share, uploads=seen.uploads + counts))
            if rule.close is None:
                after = tree.where(jnp.asarray(arrival.closes), after._replace(clip=adapted(after.clip)), after)
        columns = {"clip": bound, "clipped": (accepted & (norm > bound)).astype(real)}
        return after, memory, info._replace(columns={**info.columns, **columns})

    def adapted(seen: Clip) -> Clip:
        share = seen.below / jnp.maximum(seen.uploads, 1.0)
        moved = seen.norm * jnp.exp(-jnp.asarray(rate, real) * (share - jnp.asarray(quantile, real)))
        zero = jnp.zeros_like(seen.below)
        return Clip(jnp.where(seen.uploads > 0, moved, seen.norm), zero, zero)

    def close(state: PrivateState, memory: State) -> tuple[PrivateState, State]:
        inner, memory = closed(rule, state.inner, memory)
        return PrivateState(inner, adapted(state.clip) if adapts else ()), memory

    def dispatch(state: PrivateState, memory: State, request: Request) -> tuple[Message, State]:
        return rule.dispatch(state.inner, memory, request)

    closes = None if rule.close is None else close
    return ServerAlgorithm(init, receive, dispatch, lambda state: rule.params(state.inner), closes, rule.sums)


def clipped(upload: Tree, norm: Array, bound: Array) -> Tree:
    """``upload min(1, bound / norm)``, ``norm`` its Euclidean norm."""
    factor = jnp.where(norm > bound, bound / norm, jnp.ones_like(norm))
    return jax.tree.map(lambda leaf: leaf * factor.astype(leaf.dtype), upload)


def noised(key: Key, upload: Tree, deviation: Array) -> Tree:
    """``upload`` plus independent Gaussian noise of this standard deviation, leaf by leaf."""
    leaves, structure = jax.tree.flatten(upload)
    keys = jax.random.split(jax.random.fold_in(key, 0), len(leaves))
    noisy = [
        leaf + (deviation * jax.random.normal(one, leaf.shape, deviation.dtype)).astype(leaf.dtype)
        for one, leaf in zip(keys, leaves)
    ]
    return jax.tree.unflatten(structure, noisy)
