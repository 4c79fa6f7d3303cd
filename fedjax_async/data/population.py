"""``population``: a generated classification problem with any number of clients and controlled heterogeneity."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_async.check import in_range, non_negative, require, whole
from fedjax_async.data import hashing
from fedjax_async.data.federated import Federation
from fedjax_async.data.virtual import MOST, generate, generated
from fedjax_async.types import Array, FederatedData


class Problem(NamedTuple):
    """What an example of a population depends on, besides client and position; all leaves may be traced."""

    seed: Any  # uint32[2]
    directions: Any  # float32[C, d], orthonormal: where the classes lie
    separation: Any  # float32[]
    shift: Any  # float32[]
    skew: Any  # float32[]
    favourites: Any  # uint32[]


def gaussian_example(problem: Problem, client: Array, position: Array) -> tuple[Array, Array]:
    """One example of one client, by the formulas of :func:`population`; float32[d], int32[]."""
    p = problem
    classes, features = p.directions.shape
    person = hashing.fold((p.seed[0], p.seed[1]), client)
    habits = hashing.words(hashing.fold(person, 0), classes + 1)
    mine = hashing.fold(person, position + 1)
    draw = hashing.words(hashing.fold(mine, 0), 3)
    favourite = habits[0] % classes + draw[1] % p.favourites
    y = jnp.where(hashing.uniform(draw[0]) < p.skew, favourite, draw[2]) % classes
    is_class = jnp.arange(classes, dtype=jnp.uint32) == y
    centre = p.shift * hashing.normal(habits[1:]) + jnp.where(is_class, p.separation, jnp.float32(0))
    noise = hashing.normal(hashing.words(hashing.fold(mine, 1), features))
    return jnp.matmul(centre, p.directions, precision=jax.lax.Precision.HIGHEST) + noise, y.astype(jnp.int32)


def population(
    *,
    features: int = 64,
    classes: int = 10,
    separation: float = 3.0,
    shift: float = 0.5,
    skew: float = 0.5,
    favourites: int = 2,
    size: int = 64,
    std_log_size: float = 0.5,
    test_examples: int = 2000,
) -> Federation:
    """Generated classes in Gaussian noise for any number of clients, made in the compiled step; natural clients.

    Example j of client k, all numbers hashed from (seed, k, j):

    - label: with probability ``skew`` one of the client's ``favourites`` consecutive classes, the first of them
      drawn once for the client, else any class; uniform both times. So P(y = c | k) = (1 - skew)/C + skew [c in F_k]/F,
      which lies at a total variation distance of skew (1 - F/C) from the even mix that all clients have together;
    - input: x = separation m_y + shift sum_c a_kc m_c + e, with m_1 .. m_C orthonormal directions, the client's own
      a_kc ~ N(0, 1) and e ~ N(0, I): ``shift`` moves all of a client's inputs alike. float32 [features].

    Sizes: ``size`` * exp(``std_log_size`` N(0, 1)) examples, rounded, at least one; all equal with 0. The test
    set holds one example each of ``test_examples`` clients who do not take part, with even labels.

    For one model for all the best possible accuracy is :func:`ceiling` of separation / sqrt(1 + shift^2), 0.85 by
    default; a linear model has it. The problem costs the host 8 bytes a client; N times the largest client
    must stay below 2^31 (a million clients of up to 2,147 examples).
    """
    whole("classes", classes, 2)
    whole("features", features, classes)
    non_negative("separation", separation)
    non_negative("shift", shift)
    in_range("skew", skew, 0.0, 1.0)
    whole("favourites", favourites, 1, classes)
    whole("size", size, 1, MOST)
    non_negative("std_log_size", std_log_size)
    whole("test_examples", test_examples, 1)

    def deal(num_clients: int | None, seed: int) -> FederatedData:
        if num_clients is None:
            raise ValueError("num_clients = None: must be given, since a population may have any number of clients")
        require(num_clients + test_examples <= MOST, "num_clients", num_clients, f"at most {MOST} with the test set's")
        rng = np.random.default_rng(seed)
        problem = Problem(
            seed=rng.integers(2**32, size=2, dtype=np.uint32),
            directions=_directions(classes, features, rng),
            separation=np.float32(separation),
            shift=np.float32(shift),
            skew=np.float32(skew),
            favourites=np.uint32(favourites),
        )
        noise = rng.standard_normal(num_clients)
        drawn = np.rint(size * np.exp(np.minimum(std_log_size * noise, math.log(MOST))))
        sizes = np.clip(drawn, 1, MOST).astype(np.int32)
        strangers = num_clients + np.arange(test_examples)
        even = problem._replace(skew=np.float32(0))
        test_x, test_y = generate(gaussian_example, strangers, np.zeros(test_examples), even)
        return generated(
            gaussian_example, sizes=sizes, test_x=test_x, test_y=test_y, parameters=problem, num_classes=classes,
            name="population",
        )  # fmt: skip

    return Federation("population", deal)


def _directions(classes: int, features: int, rng: np.random.Generator) -> np.ndarray:
    """Orthonormal rows float32[C, d], every entry of about the same size.

    The slowest cosines of the discrete cosine transform, their features shuffled and some of them turned round.
    """
    phase = np.pi / features * np.outer(np.arange(classes), np.arange(features) + 0.5)
    rows = np.sqrt(np.where(np.arange(classes) == 0, 1, 2) / features)[:, None] * np.cos(phase)
    return (rows[:, rng.permutation(features)] * rng.choice([-1.0, 1.0], features)).astype(np.float32)


def ceiling(separation: float, classes: int = 10) -> float:
    """Accuracy of the best classifier of C equally likely classes whose means are ``separation`` times orthonormal.

    In unit Gaussian noise the best guess is the largest of the C projections:
    P = integral of phi(z - separation) Phi(z)^(C-1) dz, the error formula of orthogonal signalling.

    >>> ceiling(0.0), round(ceiling(3.0 / (1 + 0.5**2) ** 0.5), 3)
    (0.1, 0.848)
    """
    non_negative("separation", separation)
    whole("classes", classes, 2)
    z, step = np.linspace(separation - 10, separation + 10, 20_001, retstep=True)
    below = 0.5 * (1 + np.array([math.erf(v / math.sqrt(2)) for v in z]))
    density = np.exp(-0.5 * (z - separation) ** 2) / math.sqrt(2 * math.pi)
    return round(float(np.sum(density * below ** (classes - 1)) * step), 12)
