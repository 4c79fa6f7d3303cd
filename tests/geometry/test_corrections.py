"""Delay corrections: against eq. 15 with its matrices, over arrivals with state, and every erratum and edge case."""

import copy
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_async import Facts, geometry
from fedjax_async.geometry import CORRECTIONS, GROUPINGS, PHASES, norm_falls, orthodyn, share_passes, steps_pass
from tests.geometry import textbook
from tests.geometry.made_up import GROUPS, close, flat, like, scaled, trees, vector
from tests.refusals import refusals

seeds = st.integers(0, 2**32 - 1)
ortho_correct = jax.jit(geometry.ortho_correct, static_argnames="per")
gradient_surgery = jax.jit(geometry.gradient_surgery, static_argnames="per")
angles = st.sampled_from([-1.0, -0.5, 0.0, 0.5, 1.0])


@functools.cache
def corrector(name, **options):
    correction = CORRECTIONS[name](**options)
    return correction.init, jax.jit(correction.correct)


def once(name, delta, shift, **options):
    init, correct = corrector(name, **options)
    return correct(delta, shift, init(delta))[0]


@pytest.mark.float64
@pytest.mark.parametrize("per", GROUPINGS)
@settings(max_examples=40)
@given(seed=seeds, alpha=st.sampled_from([0.0, 0.5, 1.0]), threshold=angles, still=st.booleans())
def test_every_group_is_corrected_by_itself(per, seed, alpha, threshold, still):
    delta, shift = trees(seed, 2)
    if still:  # a group that did not change keeps its change, whatever alpha
        delta["dense"] = jax.tree.map(jnp.zeros_like, delta["dense"])
    have = ortho_correct(delta, shift, alpha=alpha, threshold=threshold, per=per)
    surgery = gradient_surgery(delta, shift, per=per)
    for group in GROUPS[per]:
        d, b = vector(delta, group), vector(shift, group)
        close(vector(surgery, group), textbook.surgery(d, b))
        if abs(d @ b) < (1 - 1e-9) * np.linalg.norm(d) * np.linalg.norm(b) or not d.any() or threshold == 1.0:  # no tie
            close(vector(have, group), textbook.ortho_correct(d, b, alpha, threshold), atol=1e-11)


@pytest.mark.parametrize("per", GROUPINGS)
@settings(max_examples=40)
@given(seed=seeds, d_size=st.sampled_from([1e-30, 1.0, 1e30]), b_size=st.sampled_from([1e-30, 1.0, 1e30]))
def test_orthostrict_is_orthogonal_to_the_drift_at_every_size_in_float32(per, seed, d_size, b_size):
    """Erratum A1: the paper's division by |b| instead of |b|^2 fails this."""
    delta, shift = (jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree) for tree in trees(seed, 2))
    out = ortho_correct(scaled(delta, d_size), scaled(shift, b_size), threshold=1.0, per=per)
    for group in GROUPS[per]:
        d, b, have = vector(delta, group), vector(shift, group), vector(out, group) / d_size
        assert abs(have.astype(float) @ b) <= 3e-6 * np.linalg.norm(d) * np.linalg.norm(b)


@pytest.mark.parametrize("per", GROUPINGS)
@settings(max_examples=40)
@given(seed=seeds, factor=st.floats(0.01, 100.0))
def test_orthostrict_removes_a_parallel_change_although_its_cosine_rounds_above_one(per, seed, factor):
    shift = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), trees(seed, 1)[0])
    delta = scaled(shift, factor)
    out = ortho_correct(delta, shift, alpha=0.5, threshold=1.0, per=per)
    np.testing.assert_allclose(flat(out), 0.0, atol=1e-6 * np.abs(flat(delta)).max())


@pytest.mark.float64
@settings(max_examples=60)
@given(seed=seeds, share=st.sampled_from([-2.0, -0.3, 0.0, 0.4, 0.9, 1.0, 3.0]))
def test_orthopos_is_surgery_on_the_position_only_outside_the_gap(seed, share):
    """Erratum A2: not for ``0 < <Delta, b> < |b|^2``."""
    other, shift = trees(seed, 2)
    b = flat(shift)
    across = flat(other) - (flat(other) @ b) / (b @ b) * b
    delta = like(across + share * b, shift)  # <Delta, b> = share |b|^2
    have = flat(ortho_correct(delta, shift, alpha=1.0, threshold=1e-9))  # 1e-9: orthogonal to rounding counts as 0
    position = jax.tree.map(jnp.subtract, delta, shift)
    surgery = flat(gradient_surgery(position, shift))
    if 0 < share < 1:
        close(have, flat(position), atol=1e-9)
        assert np.abs(have - surgery).max() > 1e-3 * np.abs(b).max()
    else:
        close(have, surgery, atol=1e-8)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_zero_drift_or_zero_change_gives_the_change(name):
    delta, shift = trees(1, 2)
    nothing = jax.tree.map(jnp.zeros_like, delta)
    jax.tree.map(np.testing.assert_array_equal, once(name, delta, nothing), delta)
    if name == "fedasync":  # it always trusts the position
        close(once(name, nothing, shift), scaled(shift, -1.0))
    else:
        jax.tree.map(np.testing.assert_array_equal, once(name, nothing, shift), nothing)
    jax.tree.map(np.testing.assert_array_equal, once(name, nothing, nothing), nothing)


BY_HAND = {
    "asgd": lambda d, b: d,
    "fedasync": lambda d, b: d - b,
    "dc_asgd": lambda d, b: textbook.corrected(d, b, 0.04, np.diag(d * d)),
    "dc_asgd_a": textbook.DCASGDa(9),
    "orthocorrect": lambda d, b: textbook.ortho_correct(d, b, 0.0, 0.0),
    "orthograd": textbook.surgery,
    "orthopos": lambda d, b: textbook.ortho_correct(d, b, 1.0, 0.0),
    "orthostrict": lambda d, b: d - np.outer(b, b) @ d / (b @ b),
    "orthodyn": textbook.OrthoDyn(),
}


@pytest.mark.float64
@pytest.mark.parametrize("name", CORRECTIONS)
def test_arrivals_equal_eq_15_by_default(name):
    """Many arrivals, in which OrthoDyn switches, are in ``tests/server/test_rules.py``."""
    init, correct = corrector(name)
    book, deltas, shifts = copy.deepcopy(BY_HAND[name]), trees(5, 12), trees(6, 12)
    state = init(deltas[0])
    for delta, shift in zip(deltas, shifts):
        have, state = correct(delta, shift, state)
        close(flat(have), book(flat(delta), flat(shift)))


@pytest.mark.float64
@pytest.mark.parametrize("name", PHASES)
def test_a_phase_of_orthodyn_is_the_correction_of_its_name(name):
    delta, shift = trees(4, 2)
    for each in (shift, scaled(shift, -1.0)):
        close(once("orthodyn", delta, each, phases=(name,)), once(name, delta, each))


def phases_of(correction, sizes, facts=Facts()):
    delta, shift = trees(6, 2)
    correct, state, seen = jax.jit(correction.correct), correction.init(delta, facts), []
    unit = scaled(delta, 1 / np.linalg.norm(flat(delta)))
    for size in sizes:
        _, state = correct(scaled(unit, size), shift, state)
        seen.append(int(state.phase))
    return seen


THREE = ("orthograd", "asgd", "orthopos")
PHASES_OF = [  # by the norm, never back; by the step, by a share of the run, or by any function
    ({"switch": norm_falls(0.5), "decay": 0.0}, [1, 2, 1.5, 0.9, 3, 10], None, [0, 0, 0, 1, 1, 1]),
    (
        {"switch": norm_falls(0.7, 0.3), "phases": THREE, "decay": 0.0},
        [1, 0.9, 0.6, 1, 0.2, 1],
        None,
        [0, 0, 1, 1, 2, 2],
    ),
    ({"switch": norm_falls(0.7, 0.3), "phases": THREE, "decay": 0.0}, [1, 0.1], None, [0, 2]),  # below both at once
    ({"phases": THREE, "decay": 0.0}, [1, 0.7, 0.6, 0.4, 0.3], None, [0, 0, 1, 1, 2]),
    ({}, 0.9 ** np.arange(40)[::-1], None, [0] * 40),
    ({}, [1.0] * 20, None, [0] * 20),
    ({"switch": steps_pass(2, 3), "phases": THREE}, [1] * 5, None, [0, 0, 1, 2, 2]),
    ({"switch": lambda trend: (trend.norm > 4.0).astype(jnp.int32)}, [1, 5, 1], None, [0, 1, 1]),
    ({"switch": lambda trend: trend.arrivals > 1}, [1, 1], None, [0, 1]),
    ({"switch": share_passes(0.25, 0.5), "phases": THREE}, [1] * 4, 4, [0, 1, 2, 2]),
    ({"switch": share_passes(0.25, 0.5), "phases": THREE}, [1] * 4, None, [0] * 4),
    ({"switch": lambda trend, updates: trend.arrivals > updates - 1}, [1] * 4, 4, [0, 0, 0, 1]),
    # 0.13 x 900 is 116.99999 in float32
    ({"switch": share_passes(0.13)}, [1] * 118, 900, [0] * 117 + [1]),
]


@pytest.mark.parametrize(("options", "lengths", "updates", "phases"), PHASES_OF)
def test_orthodyn_switches(options, lengths, updates, phases):
    facts = Facts() if updates is None else Facts(updates=updates)
    assert phases_of(orthodyn(**options), lengths, facts) == phases


def test_the_default_switch_acts_in_a_short_run_of_falling_changes():
    """Its average starts at the first length, not at 0; later lengths count as in the textbook's weighted mean."""
    sizes = 0.9 ** np.arange(40)
    wanted = textbook.OrthoDyn()
    late = [(wanted(np.array([size, 0.0]), np.ones(2)), wanted.phase)[1] for size in sizes]
    assert phases_of(orthodyn(), sizes) == late and late[10] == 0 and late[20] == 1


OF_TWO = r"^switch\(trend\) = {}: must be a whole number from 0 to 1"
test_what_a_switch_returns_is_checked = refusals(
    (lambda trend: trend.average, {}, OF_TWO.format(r"'float32\[\]'")),
    (lambda trend: jnp.int32(5), {}, OF_TWO.format("5")),
    (lambda trend: trend.arrivals // 50, {}, OF_TWO.format("20000")),  # after a million arrivals
    (lambda trend: -1, {}, OF_TWO.format("-1")),
    (lambda trend: jnp.zeros(2, jnp.int32), {}, OF_TWO.format(r"'int32\[2\]'")),
    (lambda trend: None, {}, OF_TWO.format("None")),
    (norm_falls(0.5, 0.25), {}, OF_TWO.format("2")),  # of three phases
    (lambda trend: trend.norm > 1, {"phases": THREE}, r"= 'bool\[\]': must be a whole number from 0 to 2, int32\[\]$"),
    by=lambda switch, options: orthodyn(switch=switch, **options),
)


def test_hyperparameters_may_be_traced():
    delta, shift = trees(7, 2)
    alphas = jnp.array([0.0, 0.5, 1.0])

    def swept(alpha):
        return geometry.orthocorrect(alpha=alpha, threshold=alpha - 0.5).correct(delta, shift, ())[0]

    together = jax.jit(jax.vmap(swept))(alphas)
    for k, alpha in enumerate(alphas):
        alone = once("orthocorrect", delta, shift, alpha=float(alpha), threshold=float(alpha) - 0.5)
        close(jax.tree.map(lambda leaf, k=k: leaf[k], together), alone, rtol=1e-5, atol=1e-6)


test_input_is_checked = refusals(
    ("orthograd", {"per": "layers"}, "per = 'layers': unknown; did you mean 'layer'"),
    ("orthocorrect", {"threshold": 1.5}, r"threshold = 1\.5: must be between -1\.0 and 1\.0"),
    ("orthocorrect", {"alpha": float("nan")}, "alpha = nan: must be between -inf and inf"),
    ("orthocorrect", {"alpha": float("inf")}, "alpha = inf: must be a finite number"),
    ("dc_asgd", {"strength": -1}, "strength = -1: must be a finite number >= 0"),
    ("dc_asgd_a", {"decay": 1.0}, r"decay = 1\.0: must be at least 0 and below 1"),
    ("dc_asgd_a", {"eps": 0.0}, r"eps = 0\.0: must be a finite number > 0"),
    ("orthodyn", {"phases": ("orthograd", "orthopoz")}, "phases = 'orthopoz': unknown; did you mean 'orthopos'"),
    ("orthodyn", {"phases": ()}, r"phases = \(\): must be at least one phase"),
    ("orthodyn", {"decay": -0.1}, r"decay = -0\.1: must be at least 0 and below 1"),
    by=lambda name, options: CORRECTIONS[name](**options),
)
test_switches_check_their_thresholds = refusals(
    (lambda: norm_falls(2), r"fraction = 2: must be between 0\.0 and 1\.0"),
    (lambda: steps_pass(-1), "count = -1: must be a finite number >= 0"),
    (lambda: share_passes(1.5), r"share = 1\.5: must be between 0\.0 and 1\.0"),
)
