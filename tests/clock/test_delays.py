import numpy as np
import pytest

from fedjax_async.base.notices import RunWarning
from fedjax_async.clock import DELAYS, bind_delays
from fedjax_async.clock.delays import rpi_table
from tests.refusals import refusals

SPECS = [
    "constant", "constant:mean=10,heterogeneity=0.5", "normal:mean=60,std=20", "lognormal:sigma=0.5", "half_normal",
    "uniform", "exponential:mean=3", "gamma:mean=2,std=2", "pareto:shape=1.5", "rpi", "rpi:family=lognormal",
    "rpi:family=normal_or_mean,replacement=true", "rpi:family=half_normal,pooled=true",
]  # fmt: skip


def test_the_list_above_covers_the_registry():
    assert {spec.partition(":")[0] for spec in SPECS} | {"csv", "trace"} == set(DELAYS)


@pytest.mark.parametrize("spec", SPECS)
def test_a_duration_depends_only_on_seed_client_and_number(spec):
    few, many = bind_delays(spec, 10, 3), bind_delays(spec, 1000, 3)
    clients, numbers = np.meshgrid(np.arange(10), np.arange(40), indexing="ij")
    table = few.durations(clients, numbers)
    assert (table.shape, table.dtype) == ((10, 40), np.float64) and (table > 0).all()
    some = np.random.default_rng(0).permutation(table.size)
    np.testing.assert_array_equal(few.durations(clients.ravel()[some], numbers.ravel()[some]), table.ravel()[some])
    np.testing.assert_array_equal(many.durations(clients, numbers), table)
    assert few.durations(7, 33) == table[7, 33] and few.durations(7, 33).shape == ()
    if "constant" not in spec or "heterogeneity" in spec:
        assert (bind_delays(spec, 10, 4).durations(clients, numbers) != table).any()


def test_speeds_are_drawn_once_a_client_with_mean_one():
    x = bind_delays("constant:mean=10,heterogeneity=0.5", 5000, 0).durations(np.arange(5000)[:, None], np.arange(3))
    np.testing.assert_array_equal(x[:, 0], x[:, 2])
    assert abs(np.log(x[:, 0]).std() - 0.5) < 0.02
    assert abs(x.mean() - 10) < 0.4
    gamma = bind_delays("constant:heterogeneity=0.5,speeds=gamma", 5000, 0).durations(np.arange(5000), 0)
    assert abs(gamma.std() - np.sqrt(np.expm1(0.25))) < 0.03
    with pytest.warns(RunWarning, match="^delay: speeds = 'exponential' has no effect without heterogeneity"):
        equal = bind_delays("constant:speeds=exponential", 100, 0).durations(np.arange(100), 0)
    np.testing.assert_array_equal(equal, 1.0)


@pytest.mark.parametrize(
    ("family", "why"), [("exponential", "whose deviation is its mean"), ("constant", "which never")]
)
def test_a_heterogeneity_that_the_speeds_cannot_have_is_said(family, why):
    text = f"^delay: the size of heterogeneity = 0.3 has no effect with speeds = '{family}', {why}"
    with pytest.warns(RunWarning, match=text):
        bind_delays(f"lognormal:heterogeneity=0.3,speeds={family}", 5, 0)


def test_speed_times_noise():
    spec, jobs = "lognormal:sigma=0.3", (np.arange(50)[:, None], np.arange(20))
    ratio = bind_delays(f"{spec},heterogeneity=1", 50, 1).durations(*jobs) / bind_delays(spec, 50, 1).durations(*jobs)
    np.testing.assert_allclose(ratio, np.repeat(ratio[:, :1], 20, axis=1))
    assert ratio[:, 0].std() > 0.3


@pytest.mark.parametrize(("options", "seconds"), [
    ("reference_steps=10,bandwidth=100,bandwidth_up=50", 2 * np.array([1, 2, 5, 10]) / 10 + 1000 / 100 + 500 / 50),
    ("bandwidth=100", 2 + 15), ("heterogeneity=0", 2),
])  # fmt: skip
def test_compute_is_proportional_to_steps_and_communication_to_bytes(options, seconds):
    steps = np.array([1, 2, 5, 10])
    time = bind_delays(f"constant:mean=2,{options}", 4, 0).durations(np.arange(4), 0, steps, 1000, 500)
    np.testing.assert_allclose(time, np.broadcast_to(seconds, 4), rtol=1e-14)


def test_rpi_deals_profiles_without_replacement_while_they_last():
    means = np.array([96.2, 904.1, 360.2, 276.6, 150.2, 161.4, 177.2, 106.3, 385.6])
    drawn = bind_delays("rpi:profiles=slow,family=constant", 27, 5).durations(np.arange(27), 0).reshape(3, 9)
    np.testing.assert_allclose(np.sort(drawn, axis=1), np.tile(np.sort(means), (3, 1)))
    assert (drawn[0] != drawn[1]).any()
    fast = bind_delays("rpi:profiles=fast,family=constant", 5, 0).durations(np.arange(5), 0)
    np.testing.assert_allclose(np.sort(fast), [8.9, 10.7, 12.3, 12.7, 15.4])
    assert len(np.unique(bind_delays("rpi:profiles=all,family=constant", 14, 0).durations(np.arange(14), 0))) == 14


def test_rpi_with_replacement_draws_each_profile_as_often():
    spec = "rpi:family=constant,replacement=true"
    drawn = bind_delays(spec, 900, 1).durations(np.arange(900), 0)
    _, counts = np.unique(drawn, return_counts=True)
    assert len(counts) == 9 and counts.min() > 60 and 100 < counts.max() < 140
    np.testing.assert_array_equal(bind_delays(spec, 5, 1).durations(np.arange(5), 0), drawn[:5])


def test_pooled_rounds_have_the_moments_of_all_profiles_and_the_uniform_their_percentiles():
    rng, table = np.random.default_rng(0), rpi_table()
    rounds = rng.normal(table.mean, table.std, (100_000, 9))
    clients, numbers = np.arange(4)[:, None], np.arange(20_000)
    found = bind_delays("rpi:pooled=true,family=lognormal", 4, 0).durations(clients, numbers)
    np.testing.assert_allclose(found.mean(axis=1), rounds.mean(), rtol=0.03)
    np.testing.assert_allclose(found.std(), rounds.std(), rtol=0.05)
    half = bind_delays("rpi:pooled=true,family=half_normal", 4, 0).durations(clients, numbers)
    np.testing.assert_allclose(half.mean(axis=1), rounds.mean(), rtol=0.03)
    np.testing.assert_allclose(half.std() / half.mean(), np.sqrt(np.pi / 2 - 1), rtol=0.02)  # the widest above 0
    uniform = bind_delays("rpi:pooled=true,family=uniform", 4, 0).durations(clients, numbers)
    weights = 1 / np.mean(rounds > 0, axis=0)  # each profile counts alike, whatever share of it is positive
    order = np.argsort(rounds.ravel())
    cumulative = np.cumsum((np.broadcast_to(weights, rounds.shape) * (rounds > 0)).ravel()[order])
    ends = rounds.ravel()[order][np.searchsorted(cumulative / cumulative[-1], (0.05, 0.95))]
    np.testing.assert_allclose([uniform.min(), uniform.max()], ends, rtol=0.02)


def test_rpi_ignores_work_and_size_unless_asked():
    clients, spec = np.arange(14), "rpi:family=constant"
    total = bind_delays(spec, 14, 0).durations(clients, 0)
    np.testing.assert_array_equal(bind_delays(spec, 14, 0).durations(clients, 0, 99, 10**9, 10**9), total)
    parts = bind_delays(f"{spec},reference_steps=10,reference_bytes=1000", 14, 0)
    compute, communication = parts.durations(clients, 0, 10, 0, 0), parts.durations(clients, 0, 0, 400, 600)
    np.testing.assert_allclose(compute + communication, total)
    np.testing.assert_allclose(compute[total.argmax()], 44.6)
    np.testing.assert_allclose(communication[total < 20], 0, atol=1e-9)


def test_pooled_rounds_spend_the_share_of_all_profiles_on_training():
    table = rpi_table()
    pooled = bind_delays("rpi:family=constant,pooled=true,reference_steps=10,reference_bytes=1000", 3, 0)
    trained = pooled.durations(np.arange(3), 0, 10, 0, 0) / pooled.durations(np.arange(3), 0, 10, 400, 600)
    np.testing.assert_allclose(trained, table.compute.sum() / table.mean.sum())
    assert trained[0] < 0.9


def test_csv_by_client_by_device_and_with_a_compute_part(tmp_path):
    path = tmp_path / "delays.csv"
    path.write_text("client, mean, std\n2,30,0\n0,10,0\n\n1,20,0\n")
    np.testing.assert_array_equal(bind_delays(f"csv:path={path}", 3, 0).durations(np.arange(3), 5), [10, 20, 30])
    path.write_text("\ufeffdevice,std,mean,compute\nphone,0,10,4\nboard,0,20,50\n", encoding="utf-8")
    spec = f"csv:path={path},reference_steps=2,reference_bytes=100"
    time = bind_delays(spec, 2, 0).durations(np.arange(2), 0, 1, 100, 100)
    # 4 s of 10 are compute (halved), 6 communication (doubled); more compute than total: all compute
    np.testing.assert_allclose(np.sort(time), [20 / 2, 4 / 2 + 6 * 2])


test_bad_delays_are_one_line_value_errors = refusals(
    ("constant:mean=0", "mean = 0"), ("constant:mean=-1", "mean = -1"), ("constant:mean=nan", "mean = nan"),
    ("constant:mean=soon", "mean = 'soon'"), ("normal:std=-1", "std = -1"), ("lognormal:sigma=-0.5", "sigma = -0.5"),
    ("pareto:shape=1", "shape = 1"), ("constant:heterogeneity=-1", "heterogeneity = -1"),
    ("constant:bandwidth=0", "bandwidth = 0"), ("constant:reference_steps=0", "reference_steps = 0"),
    ("constant:speeds=lognorml", "did you mean 'lognormal'"), ("rpi:profiles=medium", "profiles = 'medium'"),
    ("rpi:family=normall", "did you mean 'normal'"), ("csv:path=nowhere.csv", "nowhere.csv"),
    ("konstant", "did you mean 'constant'"),
    by=lambda spec: bind_delays(spec, 4, 0),
)  # fmt: skip
test_durations_refuse_clients_that_do_not_exist = refusals(
    (4, 0, r"0\.\.3"), by=bind_delays("constant", 4, 0).durations
)


def test_a_trace_replays_each_clients_jobs_in_order_and_begins_again(tmp_path):
    path = tmp_path / "jobs.csv"
    path.write_text("client,seconds\n1,10\n0,3\n1,20\n0,4\n1,30\n")
    bound = bind_delays(f"trace:path={path}", 2, 0)
    want = [[3, 4, 3, 4], [10, 20, 30, 10]]
    np.testing.assert_array_equal(bound.durations(np.arange(2)[:, None], np.arange(4)), want)
    assert bound.durations(1, 4) == 20.0
    path.write_text("device,seconds\na,1\nb,2\nb,3\n")
    drawn = bind_delays(f"trace:path={path}", 4, 0).durations(np.arange(4)[:, None], np.arange(2))
    assert sorted(map(tuple, drawn.tolist())) == [(1, 1), (1, 1), (2, 3), (2, 3)]
