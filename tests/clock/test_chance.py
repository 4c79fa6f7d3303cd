import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_async.clock.chance import FAMILIES, Draws, generator, pareto_tail

SIDE = 300  # clients, and numbers of each client
PLACES = np.arange(SIDE)[:, None], np.arange(SIDE)
GAMMA = math.gamma


def normal_law(x):
    return np.array([math.erfc(-one / math.sqrt(2)) / 2 for one in x])


def gamma_law(a):
    """The distribution function of the gamma, by the series of the incomplete gamma function."""

    def law(x):
        total = term = np.full_like(x, 1 / GAMMA(a + 1))
        for n in range(1, 200):
            term = term * x / (a + n)
            total = total + term
        return x**a * np.exp(-x) * total

    return law


def positive_normal(mean, std):
    """The distribution function of the Gaussian conditioned on being positive."""
    (below,) = normal_law(np.array([-mean / std]))
    return lambda x: (normal_law((x - mean) / std) - below) / (1 - below)


def pareto_law(index):
    return lambda x: 1 - (60 * (1 - 1 / index) / x) ** index


def of_family(name, mean=60.0, std=15.0):
    return lambda draws: FAMILIES[name](draws, np.asarray(mean), np.asarray(std))


S, HALF = math.sqrt(math.log(1 + 1 / 16)), 15 / math.sqrt(1 - 2 / math.pi)
LAWS = {
    "random": (lambda d: d.random(), lambda x: x),
    "standard_normal": (lambda d: d.standard_normal(), normal_law),
    "standard_exponential": (lambda d: d.standard_exponential(), lambda x: -np.expm1(-x)),
    "standard_gamma of 0.4": (lambda d: d.standard_gamma(np.array(0.4)), gamma_law(0.4)),
    "standard_gamma of 3": (lambda d: d.standard_gamma(np.array(3.0)), gamma_law(3.0)),
    # durations of mean 60 and standard deviation 15, where the family has both
    "normal": (of_family("normal"), positive_normal(60, 15)),
    "lognormal": (of_family("lognormal"), lambda x: normal_law((np.log(x / 60) + S**2 / 2) / S)),
    "half_normal": (
        of_family("half_normal"), lambda x: 2 * normal_law((x - 60) / HALF + math.sqrt(2 / math.pi)) - 1
    ),
    "uniform": (of_family("uniform"), lambda x: 0.5 + (x - 60) / (2 * math.sqrt(3) * 15)),
    "exponential": (of_family("exponential"), lambda x: -np.expm1(-x / 60)),
    "gamma": (of_family("gamma"), lambda x: gamma_law(16)(x * 4 / 15)),
    "pareto": (of_family("pareto"), pareto_law(1 + math.sqrt(17))),
    "pareto of a tail": (lambda d: pareto_tail(1.5)(d, np.asarray(60.0), None), pareto_law(1.5)),
    # of a std that a positive number of the family cannot have; truncation raises the mean
    "wide normal": (of_family("normal", 96.2, 135.6), positive_normal(96.2, 135.6)),
    "wide half_normal": (of_family("half_normal", 10, 50), lambda x: 2 * normal_law(x * math.sqrt(0.02 / math.pi)) - 1),
    "wide uniform": (of_family("uniform", 10, 50), lambda x: x / 20),
}  # fmt: skip


def follows(x, law):
    """Kolmogorov and Smirnov's distance is below its 99.99 % quantile, 2.23 / sqrt(n)."""
    exact = law(np.sort(x.reshape(-1)))
    assert exact.min() >= 0 and exact.max() <= 1
    steps = np.arange(x.size + 1) / x.size
    return max((steps[1:] - exact).max(), (exact - steps[:-1]).max()) < 2.23 / math.sqrt(x.size)


def square(seed=0, stream="noise", *before):
    return Draws(seed, stream, *before, *PLACES)


@pytest.mark.parametrize("name", LAWS)
def test_numbers_follow_their_law(name):
    draw, law = LAWS[name]
    for seed in (0, 1, 2**70):
        x = draw(square(seed))
        assert (x.dtype, x.shape) == (np.float64, (SIDE, SIDE))
        assert follows(x, law)
        assert len(np.unique(x)) == x.size


def test_a_gaussian_or_its_mean():
    x = of_family("normal_or_mean", 96.2, 135.6)(square())
    (below,) = normal_law(np.array([-96.2 / 135.6]))
    assert abs(np.mean(x == 96.2) - below) < 0.005
    assert follows(x[x != 96.2], positive_normal(96.2, 135.6))


def test_geometric_numbers_follow_their_law():
    x = square().geometric(np.array(0.3))
    assert x.min() == 1
    for k in range(1, 10):
        share = 0.3 * 0.7 ** (k - 1)
        assert abs((x == k).mean() - share) < 4 * math.sqrt(share / x.size)
    assert (square().geometric(np.array(1.0)) == 1).all()


def test_neighbours_of_every_kind_are_independent():
    def pair(one, other):
        one, other = one.random(), other.random()
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 4.5 / SIDE
        # dependence that the correlation misses: pairs fill the 4 x 4 cells of the unit square equally
        cells = np.bincount((4 * one.ravel()).astype(int) * 4 + (4 * other.ravel()).astype(int), minlength=16)
        assert ((cells - x_mean) ** 2 / x_mean).sum() < 50  # chi-square of 15 degrees: 50 is the 99.999 % quantile

    x_mean = SIDE * SIDE / 16
    clients, numbers = PLACES
    pair(square(), square(1))
    pair(square(2**64), square(2**64 + 1))
    pair(square(), square(0, "jitter"))
    pair(square(0, "noise", 0), square(0, "noise", 1))
    pair(square(), Draws(0, "noise", clients + 1, numbers))
    pair(square(), Draws(0, "noise", clients, numbers + 1))
    pair(square(), Draws(0, "noise", clients + 2**20, numbers))
    pair(Draws(0, "noise", clients, numbers + SIDE), Draws(0, "noise", numbers + SIDE, clients))
    later = square()
    later.random()
    pair(square(), later)


def test_every_bit_of_a_place_changes_half_of_the_bits_of_its_number():
    places = np.arange(4000)
    for bit in range(40):
        one, other = (
            (Draws(0, "noise", who, 0).random() * 2**53).astype(np.int64) for who in (places, places ^ 1 << bit)
        )
        flipped = (one ^ other)[:, None] >> np.arange(53) & 1
        assert abs(flipped.mean(axis=0) - 0.5).max() < 5 / (2 * math.sqrt(4000))


@given(st.integers(0, 2**80), st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 2**31)), min_size=1, max_size=9))
@settings(deadline=None, max_examples=60)
def test_a_number_depends_on_its_place_alone(seed, places):
    clients, numbers = np.array(places).T
    shapes = 0.2 + numbers % 7

    def everything(draws, shape):
        yield from (
            draws.random(),
            draws.standard_gamma(shape),
            draws.standard_normal(),
            draws.standard_exponential(),
            draws.geometric(1 / (1 + shape)),
        )

    together = list(everything(Draws(seed, "noise", clients, numbers), shapes))
    for k, (client, number) in enumerate(places):
        alone = list(everything(Draws(seed, "noise", client, number), shapes[k : k + 1]))
        for one, other in zip(together, alone):
            assert one[k] == other[0]


def test_a_mask_draws_some_of_the_numbers():
    mask = np.arange(SIDE * SIDE).reshape(SIDE, SIDE) % 3 == 0
    np.testing.assert_array_equal(square().standard_normal(mask), square().standard_normal()[mask])


def test_another_seed_stream_or_counter_gives_other_numbers():
    seen = [
        generator(*given).integers(2**62)
        for given in [(0, "rounds"), (1, "rounds"), (0, "sampling"), (0, "rounds", 1), (0, "rounds", 2)]
    ]
    assert len(set(seen)) == len(seen)


@pytest.mark.parametrize("name", FAMILIES)
def test_means_and_deviations_are_arrays_one_a_client(name):
    mean, std = np.array([1.0, 10.0, 1000.0]), np.array([0.0, 1.0, 400.0])
    x = FAMILIES[name](Draws(0, "noise", np.arange(60_000).reshape(20_000, 3)), mean, std)
    assert x.shape == (20_000, 3)
    assert np.isfinite(x).all()
    np.testing.assert_allclose(x.mean(0), mean, rtol=0.05)
    if name != "exponential":
        np.testing.assert_allclose(x[:, 0], 1.0, rtol=1e-12)


@pytest.mark.parametrize("name", ["gamma", "pareto"])
def test_a_spread_too_small_to_compute_with_is_none(name):
    """The rejection method of gamma never accepted for them: 1 + x / sqrt(9 d) is 1."""
    x = of_family(name, [1.0, 1e3, 1e3], [1e-160, 1e-9, 1.0])(Draws(0, "noise", np.arange(3000).reshape(1000, 3)))
    assert (x[:, 0] == 1).all() and (x[:, 1] == 1e3).all()
    assert x[:, 2].std() == pytest.approx(1, rel=0.2)


def test_redraws_leave_the_other_places_alone():
    calm = np.full(SIDE, 0.01)
    wild = np.r_[calm[:32], np.full(SIDE - 32, 5.0)]
    one, other = (of_family("normal", np.ones(SIDE), std)(square()) for std in (calm, wild))
    np.testing.assert_array_equal(one[:, :32], other[:, :32])
