"""Which properties of a client's loss f lift to FedAvg's surrogate loss; the open question of section 7.

``grad h_k = I - (I - gamma grad f)^k`` for one client, and the surrogate loss f_s is the mean of the clients' h_k.

| property of f | of its h_k | of f_s | where |
| --- | --- | --- | --- |
| convex, strictly, strongly | yes | yes | :func:`surrogate_constants`, Lemma 10 |
| ``grad f (y) = 0`` | yes, ``grad h_k (y) = 0`` | no | Lemma 9 |
| no other critical points | yes for gamma < 2 / beta | no | gradient descent lowers f, so it has no cycles |
| Polyak-Lojasiewicz | yes for gamma <= 1 / beta | **no**, even for k = 1 | :func:`surrogate_pl_constant` |
| bounded below | **no**, from k = 2 on | no | :func:`drifting_loss` |

At ``gamma = 2 / beta`` the third row fails: ``f = beta x^2 / 2`` and k = 2 give h_2 = 0. For the fourth, the mean of
``x^2 + 3 sin^2 x`` and ``(x - 4.4)^2 / 2`` has two minima of different heights; each of the two satisfies the
condition.

Source: Charles and Rush (2022), lemma 9 and section 7, which says without an example that boundedness does not lift and
asks about the Polyak-Lojasiewicz condition. The answers are ours.
"""

from __future__ import annotations

import jax.numpy as jnp

from fedjax_async.base import check
from fedjax_async.types import Array


def surrogate_pl_constant(mu: float, beta: float, gamma: float, k: int) -> float:
    """A constant of h_k in ``||grad h_k||^2 / 2 >= mu' (h_k - min h_k)``, from f's ``||grad f||^2 / 2 >= mu (f - f*)``.

    ``mu' = (sqrt(1 + rho mu / beta) - 1)^2`` with ``rho = 1 - (1 - gamma mu)^k``. It is at most 0.18 and no sharp
    constant. Let d be the distance of x to the minimisers of f, and ``s = ||x - T^k x||`` that of k steps:

    1. The steps lower f, by at least ``rho (f - f*) >= rho mu d^2 / 2`` (quadratic growth follows from the condition;
       Karimi et al., 2016), and by at most ``beta d s + beta s^2 / 2``. So ``s >= sqrt(mu') d``, and h_k has no other
       critical points.
    2. The minimisers of f are connected (the gradient flow contracts the space to them), so h_k is constant there: its
       critical values have measure 0 (Sard).
    3. ``J(T)`` lies in ``[0, 1 + gamma beta]``, so h_k's Hessian is at most 1 (Proposition 5), and a step of gradient
       descent on h_k at rate 1, which is T^k, lowers h_k. The steps lead to a minimiser of f: h_k is lowest there, and
       ``h_k(x) - min h_k <= d^2 / 2``.

    Args:
      mu: f's constant, > 0 and at most beta.
      beta: Lipschitz constant of grad f.
      gamma: local learning rate, at most ``1 / beta``.
      k: local steps; ``I - gamma grad f`` must be j-conservative for j <= k.
    """
    check.positive("beta", beta)
    check.positive("mu", mu)
    check.in_range("mu", mu, 0, beta)
    check.positive("gamma", gamma)
    check.in_range("gamma", gamma, 0, 1 / beta)
    check.whole("k", k)
    fall = 1 - (1 - gamma * mu) ** k
    return float(((1 + fall * mu / beta) ** 0.5 - 1) ** 2)


def drifting_loss(x: Array) -> Array:
    """``cos x + sin(2 x) / 2``, summed over float[D]: bounded and smooth, but from k = 2 on h_k falls without end.

    With ``u = f'``, the mean slope of h_2 over a period is that of ``gamma u(x - gamma u)``, which is
    ``gamma (u - gamma u u' + gamma^2 u^2 u'' / 2 - ...)``. The first two terms have mean 0 and the third has
    ``-gamma^3 mean(u u'^2) = (3 / 4) gamma^3``. So h_2 goes to minus infinity with x. The two waves must differ in
    symmetry: for cos x alone the mean is 0.
    """
    return jnp.sum(jnp.cos(x) + jnp.sin(2 * x) / 2)
