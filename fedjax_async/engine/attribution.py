"""A probe of how each arrival changes the losses of some examples, and how a server step is divided among arrivals.

If every arrival moves the server's model, from ``x`` to ``x'``, the arrival caused ``F(x') - F(x)``, to first order
``<grad F(x), x' - x>``. If several arrivals share a server step, each is compared with an arrival of an honest client
that returns the server's own model: ``p_k`` is the difference that the k-th upload makes to the model if the step
closes right after it. In a mean, every later arrival of the step increases the divisor: ``keep_k`` is the factor by
which the k-th arrival scales the sum of the parts before it. For every mean and sum of uploads the step is then
``x' - x = sum_k p_k prod_{j > k} keep_j``. The rest of the change (curvature of F, momentum, medians) is divided
evenly among the accepted arrivals of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_async.base import tree
from fedjax_async.engine.components import Components, bound
from fedjax_async.engine.evaluation import Metrics, each_row
from fedjax_async.server import closed
from fedjax_async.types import Array, Arrival, DataParts, Facts, Model, Params, ServerAlgorithm, State

AttributionProbe = Callable[[State, State, Arrival, DataParts], dict[str, Array]]


def is_shared(rule: ServerAlgorithm, facts: Facts) -> bool:
    """Whether several arrivals may share a server step."""
    return rule.close is not None and not facts.every_closes


def make_attribution(
    components: Components, facts: Facts, rows: tuple[np.ndarray, np.ndarray], classes: int | None
) -> AttributionProbe:
    """A probe of the losses of the examples before and after each arrival; :func:`divided` reads its columns.

    Args:
      facts: the facts about the run.
      rows: the examples, x and y, [M, ...].
      classes: G, the number of classes, if y are labels. None: all examples are counted as one class.

    The columns of the probe: for each class g the sum of its examples' losses divided by M, at the server's model
    before the arrival (``before g``), at the model if the step closes with the arrival (``after g``), and its
    derivative along ``p_k`` (``first g``); ``keep``, see above; ``accuracy before`` and ``accuracy after``; ``counts``,
    whether the rule accepted the upload.
    """
    rule = bound(components.rule, components.hyper)
    shared = is_shared(rule, facts)
    x, y = (jnp.asarray(part) for part in rows)
    group = jnp.zeros(len(y), jnp.int32) if classes is None else y.astype(jnp.int32)
    measure = make_measure(components.model, len(y), labels=classes is not None)

    def summed(values: Array) -> Array:
        sums = jax.ops.segment_sum(values.astype(jnp.result_type(float)), group, classes or 1)
        return sums / len(y)

    def probe(state: State, memory: State, arrival: Arrival, parts: DataParts) -> dict[str, Array]:
        del parts
        now = rule.params(state)

        def model_after(arrival: Arrival) -> tuple[Params, Array]:
            """The model if the step closes with the arrival, and whether the rule accepts it."""
            found, row, info = rule.receive(state, memory, arrival)
            return rule.params(closed(rule, found, row)[0]), info.weight > 0

        (after, counts), keep = model_after(arrival), jnp.ones((), jnp.result_type(float))
        without = now
        if shared:
            nothing = jax.tree.map(jnp.zeros_like, arrival.upload)
            # not malicious: what colluding attackers forge does not depend on their own upload
            neutral = arrival._replace(upload=nothing, start=now, malicious=jnp.bool_(False))
            without, _ = model_after(neutral)
            so_far = jax.tree.map(jnp.subtract, rule.params(closed(rule, state, memory)[0]), now)
            left = _share_kept(so_far, jax.tree.map(jnp.subtract, without, now))
            keep = jnp.where(counts, left, keep)  # a rejected upload is not among the divisor of a mean
        part = jax.tree.map(jnp.subtract, after, without)
        if shared:  # rounding must not give a rejected upload a part in its step
            part = tree.where(counts, part, jax.tree.map(jnp.zeros_like, part))
        losses, slopes, hits, new_losses, new_hits = measure(now, after, part, x, y)
        columns = {"before": summed(losses), "after": summed(new_losses), "first": summed(slopes)}
        accuracy = {"accuracy before": jnp.mean(hits), "accuracy after": jnp.mean(new_hits)}
        found = {f"{name} {g}": sums[g] for name, sums in columns.items() for g in range(classes or 1)}
        return found | accuracy | {"keep": keep, "counts": counts}

    return probe


def make_measure(model: Model, total: int, *, labels: bool) -> Callable[..., tuple[Array, ...]]:
    """``measure(now, after, part, x, y) -> (losses, slopes, hits, losses after, hits after)``, each [M].

    ``slopes``: derivatives of the losses at ``now`` along ``part``, in reverse mode, since some layers define no
    forward mode.
    """

    def scores(params: Params, x: Array, y: Array) -> tuple[Array, Array]:
        found = Metrics(model, labels).values(params, x, y)
        return found["loss"], found["accuracy"]

    def measure(now: Params, after: Params, part: Params, x: Array, y: Array) -> tuple[Array, ...]:
        def some(x: Array, y: Array) -> tuple[Array, ...]:
            losses, pull, hits = jax.vjp(lambda params: scores(params, x, y), now, has_aux=True)
            slopes = jax.grad(lambda weights: optax.tree.vdot(pull(weights)[0], part))(jnp.zeros_like(losses))
            return losses, slopes, hits, *scores(after, x, y)

        found: tuple[Array, ...] = each_row(some, x, y, total)
        return found

    return measure


def _share_kept(so_far: Params, left: Params) -> Array:
    """The factor that maps ``so_far`` to ``left`` (least squares); 1 if nothing has arrived before."""
    real = jnp.result_type(float)
    size, along = (optax.tree.vdot(so_far, other).astype(real) for other in (so_far, left))
    usable = jnp.isfinite(size) & jnp.isfinite(along) & (size > 0)
    return jnp.where(usable, along / jnp.where(usable, size, 1.0), 1.0).astype(real)


def divided(
    table: Mapping[str, np.ndarray], step: np.ndarray, closes: np.ndarray, *, shared: bool
) -> tuple[np.ndarray, ...]:
    """The changes of the losses that each arrival caused: ``(exact, first order)``, each float64[E, G].

    ``table``: the probe's columns, [E] each. ``step``, ``closes``: columns of the schedule, [E]. ``shared``: see
    :func:`is_shared`. The exact changes of the arrivals of a server step sum to the change of the losses by that step,
    and over a run to the change by the run. Arrivals of a step that never closes caused no change.
    """
    classes = sum(name.startswith("before ") for name in table)
    before, after, first = (
        np.stack([np.asarray(table[f"{name} {g}"], np.float64) for g in range(classes)], axis=1)
        for name in ("before", "after", "first")
    )
    if not shared:
        return after - before, first
    exact, linear = np.zeros_like(before), np.zeros_like(before)
    keep, counts = np.asarray(table["keep"], np.float64), np.asarray(table["counts"], bool)
    for number in np.unique(step):
        of = np.flatnonzero(step == number)
        if not closes[of[-1]]:
            continue
        later = np.append(np.cumprod(keep[of][::-1])[::-1][1:], 1.0)
        linear[of] = first[of] * later[:, None]
        moved = of[counts[of]] if counts[of].any() else of
        left = after[of[-1]] - before[of[0]] - linear[of].sum(axis=0)
        exact[of] = linear[of]
        exact[moved] += left / len(moved)
    return exact, linear
