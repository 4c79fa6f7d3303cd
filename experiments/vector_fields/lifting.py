"""What the surrogate loss inherits from the clients' losses, and losses that are the hardest for Theorem 13.

    python experiments/vector_fields/lifting.py --scale laptop

``lifting.csv``: Corollary 8, Lemma 9 and section 7's question about boundedness and the Polyak-Lojasiewicz condition,
each by functions in closed form: a number, and the range that the claim allows. ``hardest.csv``: the gap of FedAvg
relative to Theorem 13's bound for random quadratics, the worst quadratic and the worst convex loss.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from study import Rows, options, parse, report
from variants import common

from fedjax_async.theory import (
    EXAMPLES,
    affine_iterate,
    curl,
    displacement,
    drifting_loss,
    elementwise_iterate,
    fedavg_gap_bound,
    fedavg_hardest_threshold,
    fedavg_quadratic_gap_bound,
    fedavg_sharp_gap_bound,
    glm_iterate,
    gradient_map,
    iterate,
    server_field,
    server_iterates,
    surrogate_pl_constant,
)

POINTS = {"smoke": 50, "laptop": 2000, "paper": 20_000}
LARGEST = {"smoke": 2, "laptop": 6, "paper": 8}  # local steps, or iterations of a field
ROUNDS = {"smoke": (1, 10), "laptop": (1, 10, 100), "paper": (1, 10, 100, 1000)}
LINE = np.linspace(-8, 8, 40_001)
BETA, MU = 8.0, 1 / 32  # of x^2 + 3 sin^2 x
HARD = (1, 5, 20)  # local steps of the hardest losses


def row(claim: str, of: str, k: int, measured: float, allowed: str, holds: bool) -> dict[str, Any]:
    """One number beside what the claim allows."""
    return {"claim": claim, "of": of, "k": k, "measured": measured, "allowed": allowed, "holds": bool(holds)}


def corollary_8(scale: str) -> Iterable[dict[str, Any]]:
    """The smallest eigenvalue of ``(grad f)^k``'s Jacobian, for convex losses that are and are not conservative."""
    basis = jnp.asarray(np.linalg.qr(np.random.default_rng(0).standard_normal((3, 3)))[0])
    matrix = basis @ jnp.diag(jnp.array([0.5, 1.0, 1.5])) @ basis.T
    losses: dict[str, tuple[float, Callable[[int], Any]]] = {
        "logistic with weight decay": (0.2, partial(glm_iterate, lambda t: jax.nn.softplus(t) + 0.1 * t**2, basis)),
        "logistic": (0.0, partial(glm_iterate, jax.nn.softplus, basis)),
        "quadratic": (0.5, partial(affine_iterate, (matrix + matrix.T) / 2, jnp.ones(3))),
        "sum of ln cosh": (0.0, partial(elementwise_iterate, jnp.tanh)),
    }
    points = jnp.asarray(np.random.default_rng(1).uniform(-3, 3, (POINTS[scale], 3)))
    for name, (low, form) in losses.items():
        for k in range(1, LARGEST[scale] + 1):
            jacobians = np.asarray(jax.jit(jax.vmap(jax.jacfwd(form(k).field)))(points))
            smallest = float(np.linalg.eigvalsh(jacobians).min())
            symmetric = np.abs(jacobians - jacobians.transpose(0, 2, 1)).max() < 1e-12
            allowed = f"at least {low**k:.4g}"
            yield row(
                "Corollary 8: convexity lifts", name, k, smallest, allowed, symmetric and smallest >= low**k - 1e-12
            )
    example = EXAMPLES["exponential_sum"]
    measured = jax.jit(jax.vmap(lambda x: curl(iterate(example.field, 2), x)))
    largest = float(measured(points[:, :2] / 3).max())
    yield row(
        "its gradient must be 2-conservative", "e^x + e^(x + y), antisymmetry", 2, largest, "above 0", largest > 0.1
    )


def lemma_9(scale: str) -> Iterable[dict[str, Any]]:
    """Displacements at critical points of ``cos 2x + cos 2y``, and zeros on a line: none is lost and none is added."""
    grid = np.stack(np.meshgrid(*[np.arange(-4, 5) * np.pi / 2] * 2), axis=-1).reshape(-1, 2)
    for k in range(1, LARGEST[scale] + 1):
        move = displacement(gradient_map(lambda x: jnp.sum(jnp.cos(2 * x)), 0.4), k)
        largest = float(np.abs(jax.vmap(move)(jnp.asarray(grid))).max())
        yield row("Lemma 9: critical points stay", "cos 2x + cos 2y", k, largest, "0", largest < 1e-12)
        slopes = np.asarray(jax.jit(jax.vmap(move))(jnp.asarray(np.stack([LINE + 1e-4] * 2, axis=1))))[:, 0]
        zeros = int(np.sum(np.sign(slopes[1:]) != np.sign(slopes[:-1])))
        yield row("none is added below rate 2/beta", "cos 2x on [-8, 8], zeros", k, zeros, "11", zeros == 11)


def section_7(scale: str) -> Iterable[dict[str, Any]]:
    """Boundedness from below, and the Polyak-Lojasiewicz condition, for one client and for the mean of two."""
    period = jnp.asarray(np.linspace(0, 2 * np.pi, 4096, endpoint=False))[:, None]
    for k in range(1, LARGEST[scale] + 1):
        slopes = jax.jit(jax.vmap(displacement(gradient_map(drifting_loss, 0.2), k)))(period)
        mean = float(slopes.mean())
        falls = abs(mean) > 1e-12
        yield row("bounded below lifts", "cos x + sin(2x)/2, mean slope of h_k", k, mean, "0", not falls)
    for k in range(1, LARGEST[scale] + 1):
        own, other = (_slopes(loss, k) for loss in (_wavy, _parabola))
        heights = _integral(own)
        gaps = heights - heights.min()
        ratio = float(((own**2 / 2)[gaps > 1e-6] / gaps[gaps > 1e-6]).min())
        least = surrogate_pl_constant(MU, BETA, 1 / BETA, k)
        yield row(
            "Polyak-Lojasiewicz lifts to h_k",
            "x^2 + 3 sin^2 x, constant",
            k,
            ratio,
            f"at least {least:.3g}",
            ratio >= least,
        )
        mean = (own + other) / 2
        minima = int(np.sum((mean[1:] > 0) & (mean[:-1] <= 0)))
        yield row("and to f_s", "x^2 + 3 sin^2 x and a parabola, minima", k, minima, "1", minima == 1)


def _wavy(x: jax.Array) -> jax.Array:
    return jnp.sum(x**2 + 3 * jnp.sin(x) ** 2)


def _parabola(x: jax.Array) -> jax.Array:
    return jnp.sum((x - 4.4) ** 2) / 2


def _slopes(loss: Callable[[jax.Array], jax.Array], k: int) -> np.ndarray:
    """``grad h_k`` on the line, at the rate ``1 / BETA``."""
    move = displacement(gradient_map(loss, 1 / BETA), k)
    return np.asarray(jax.jit(jax.vmap(move))(jnp.asarray(LINE)[:, None]))[:, 0]


def _integral(slopes: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum((slopes[1:] + slopes[:-1]) / 2 * np.diff(LINE))])


def hardest(scale: str) -> Rows:
    """Gaps after t rounds of FedAvg at local rate 1, from distance 1, relative to Theorem 13's bound."""
    rows = []
    for t in ROUNDS[scale]:
        for k in HARD:
            threshold = fedavg_hardest_threshold(k, t, 1.0)
            curvature = 1 - (2 * t / (2 * t + 1)) ** (1 / k)
            losses = {
                "worst quadratic": (lambda x, a=curvature: jnp.sum(a * x**2 / 2), fedavg_quadratic_gap_bound),
                "Huber": (partial(_huber, delta=threshold), fedavg_sharp_gap_bound),
            }
            for name, (loss, bound) in losses.items():
                gap, own = _after(loss, k, t)
                rows.append({
                    "loss": name, "local steps": k, "rounds": t,
                    "gap / (D^2/2t)": gap / float(fedavg_gap_bound(t, 1.0)),
                    "predicted": float(bound(t, 1.0) / fedavg_gap_bound(t, 1.0)),
                    "own gap / (D^2/2kt)": own / float(fedavg_gap_bound(k * t, 1.0)),
                })  # fmt: skip
    return rows


def _huber(x: jax.Array, delta: float) -> jax.Array:
    return jnp.sum(optax.losses.huber_loss(x, delta=delta))


def _after(loss: Callable[[jax.Array], jax.Array], k: int, t: int) -> tuple[float, float]:
    """Gaps of the surrogate (its slope integrated) and of the loss itself, both lowest at 0, after t rounds from 1."""
    field = server_field([loss, loss], 1.0, k)
    end = jax.jit(lambda x: server_iterates(field, x, optax.sgd(1.0), t))(jnp.ones(1))[-1]
    fine = jnp.linspace(0, end[0], 200_001)
    slopes = np.asarray(jax.jit(jax.vmap(field))(fine[:, None]))[:, 0]
    return float(np.sum((slopes[1:] + slopes[:-1]) / 2) * (fine[1] - fine[0])), float(loss(end))


def run(given: argparse.Namespace) -> None:
    """Measure and write."""
    rows = [*corollary_8(given.scale), *lemma_9(given.scale), *section_7(given.scale)]
    report(rows, given, decimals={"measured": 6})
    found = hardest(given.scale)
    common.write_table(found, given.out / "hardest.csv")


if __name__ == "__main__":
    with jax.enable_x64(True):
        run(parse(options(__doc__, "lifting")))
