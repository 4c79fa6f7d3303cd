"""``population``: a generated classification problem with any number of clients and controlled heterogeneity."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_async.base import hashing
from fedjax_async.base.check import in_range, non_negative, require, whole
from fedjax_async.data.federated import Federation
from fedjax_async.data.virtual import MOST_ROWS, generate, generated
from fedjax_async.types import AnyArray, Array, FederatedData

MANY = 1_000_000  # clients


class Problem(NamedTuple):
    """The parameters that determine every example of a population; all leaves may be traced."""

    seed: AnyArray  # uint32[2]
    directions: AnyArray  # float32[C, d], orthonormal: the directions m_c of the class means
    separation: Array | np.floating  # float32[]
    shift: Array | np.floating  # float32[]
    skew: Array | np.floating  # float32[]
    favourites: Array | np.integer  # uint32[]


def gaussian_example(problem: Problem, client: Array, position: Array) -> tuple[Array, Array]:
    """One example of one client, by the formulas of :func:`population`; float32[d], int32[]."""
    p = problem
    classes, features = p.directions.shape
    client_stream = hashing.fold((p.seed[0], p.seed[1]), client)
    of_client = hashing.words(hashing.fold(client_stream, 0), classes + 1)
    example_stream = hashing.fold(client_stream, position + 1)
    of_label = hashing.words(hashing.fold(example_stream, 0), 3)
    favourite = of_client[0] % classes + of_label[1] % p.favourites
    y = jnp.where(hashing.uniform(of_label[0]) < p.skew, favourite, of_label[2]) % classes
    is_class = jnp.arange(classes, dtype=jnp.uint32) == y
    centre = p.shift * hashing.normal(of_client[1:]) + jnp.where(is_class, p.separation, jnp.float32(0))
    noise = hashing.normal(hashing.words(hashing.fold(example_stream, 1), features))
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

    Example j of client k, with all numbers hashed from (seed, k, j):

    - label: with probability ``skew`` uniform over F = ``favourites`` consecutive classes F_k of the client, otherwise
      uniform over all classes; the first class of F_k is drawn once per client. So
      P(y = c | k) = (1 - skew)/C + skew [c in F_k]/F. The labels of all clients together are uniform; their total
      variation distance from those of a client is skew (1 - F/C);
    - input: x = separation m_y + shift sum_c a_kc m_c + e, with orthonormal directions m_1 .. m_C, a_kc ~ N(0, 1) drawn
      once per client and e ~ N(0, I), float32 [features]: ``shift`` moves all inputs of a client by one vector.

    Sizes: ``size`` * exp(``std_log_size`` N(0, 1)) examples, rounded, at least one; ``std_log_size`` = 0 makes them
    equal. The test set has one example from each of ``test_examples`` further clients, with uniform labels.

    The best accuracy of one model for all clients is :func:`ceiling` of separation / sqrt(1 + shift^2), 0.85 by
    default; a linear model can reach it. The problem needs 8 bytes per client on the host. N times the size of the
    largest client must stay below 2^31 (a million clients of up to 2,147 examples), else ``ValueError``.
    """
    whole("classes", classes, 2)
    whole("features", features, classes)
    non_negative("separation", separation)
    non_negative("shift", shift)
    in_range("skew", skew, 0.0, 1.0)
    whole("favourites", favourites, 1, classes)
    whole("size", size, 1, MOST_ROWS)
    non_negative("std_log_size", std_log_size)
    whole("test_examples", test_examples, 1)

    def deal(num_clients: int | None, seed: int) -> FederatedData:
        if num_clients is None:
            raise ValueError("num_clients = None: must be given, since a population may have any number of clients")
        allowed = f"at most {MOST_ROWS - test_examples}"
        require(num_clients + test_examples <= MOST_ROWS, "num_clients", num_clients, allowed)
        if num_clients > MANY:  # drawing all sizes takes long: estimate the largest from a few thousand first
            some = np.random.default_rng(seed + 1).standard_normal(4096)
            longest = min(MOST_ROWS, size * math.exp(min(std_log_size * float(some.max()), math.log(MOST_ROWS))))
            allowed = f"at most about {MOST_ROWS / longest:.3g} clients of such sizes, since rows are numbered by int32"
            require(num_clients * longest <= 2 * MOST_ROWS, "num_clients", num_clients, allowed)
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
        drawn = np.rint(size * np.exp(np.minimum(std_log_size * noise, math.log(MOST_ROWS))))
        sizes = np.clip(drawn, 1, MOST_ROWS).astype(np.int32)
        further = num_clients + np.arange(test_examples)
        uniform = problem._replace(skew=np.float32(0))
        test_x, test_y = generate(gaussian_example, further, np.zeros(test_examples), uniform)
        return generated(
            gaussian_example, sizes=sizes, test_x=test_x, test_y=test_y, parameters=problem, num_classes=classes,
            name="population",
        )  # fmt: skip

    return Federation("population", deal)


def _directions(classes: int, features: int, rng: np.random.Generator) -> np.ndarray:
    """Orthonormal rows float32[C, d] with entries of similar size.

    The lowest frequencies of the discrete cosine transform, with features permuted and signs drawn at random.
    """
    phase = np.pi / features * np.outer(np.arange(classes), np.arange(features) + 0.5)
    rows = np.sqrt(np.where(np.arange(classes) == 0, 1, 2) / features)[:, None] * np.cos(phase)
    return (rows[:, rng.permutation(features)] * rng.choice([-1.0, 1.0], features)).astype(np.float32)


def ceiling(separation: float, classes: int = 10) -> float:
    """Best accuracy for C equally likely classes in unit Gaussian noise; means: ``separation`` * orthonormal vectors.

    The best classifier chooses the class with the largest of the C projections:
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
