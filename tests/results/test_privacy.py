"""Epsilon: equal to the library's in known cases; from the participations of real runs; None without a bound."""

from __future__ import annotations

import numpy as np
import pytest

from fedjax_async import cli, simulate
from fedjax_async.config import Settings, prepare
from fedjax_async.results import guarantees, save
from fedjax_async.results.privacy import gaussian, of_sums, sampled
from fedjax_async.types import FederatedData, Stopped
from tests.results.made_up import make_run
from tests.told import refusal

DELTA = 1e-5
SMALL = {
    **{"model": "logistic", "clients": 6, "steps": 1, "batch_size": 4, "delay": "exponential", "updates": 18},
    **{"eval_updates": 18, "eval_examples": 20},
}


# dp_accounting takes two seconds to import, so only the tests that need it do.
def library(z, count=1):
    """Epsilon of Gaussian noise by dp_accounting's distributions of the privacy loss."""
    from dp_accounting import GaussianDpEvent, pld

    coarse = pld.PLDAccountant(value_discretization_interval=1e-3)  # ten times coarser than by default, and faster
    return coarse.compose(GaussianDpEvent(z), count).get_epsilon(DELTA)


@pytest.mark.parametrize(("z", "times"), [(1.0, 1), (4.0, 9), (20.0, 100)])
def test_composed_participations_equal_the_library(z, times):
    from dp_accounting import GaussianDpEvent
    from dp_accounting.rdp import RdpAccountant

    found = of_sums(np.zeros(times, int), np.arange(times), np.ones(times), z, 0.0, 1)
    epsilon = gaussian(found[0] ** -0.5, DELTA)
    assert epsilon == pytest.approx(library(z, count=times), rel=1e-6)
    assert epsilon <= RdpAccountant().compose(GaussianDpEvent(z), times).get_epsilon(DELTA)


def test_sampled_rounds_equal_the_library():
    import dp_accounting
    from dp_accounting.rdp import RdpAccountant

    event = dp_accounting.SampledWithoutReplacementDpEvent(1000, 10, dp_accounting.GaussianDpEvent(1.0))
    renyi = RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE)
    want = renyi.compose(event, 50).get_epsilon(DELTA)
    assert sampled(2.0, 10, 1000, 50, DELTA) == pytest.approx(want, rel=1e-9)
    assert sampled(2.0, 10, 10, 50, DELTA) == pytest.approx(library(1.0, count=50), rel=1e-6)


def test_weights_and_steps_count_as_they_were():
    """Client 0 takes part in a step with weights 3 and 4, and twice in the next; noise for sums of two uploads."""
    found = of_sums(np.array([0, 1, 0, 0, 1]), np.array([0, 0, 1, 1, 1]), np.array([3.0, 4, 1, 1, 1]), 2.0, 5.0, 2)
    of_first, of_second = 9 * 2 / (4 * 25) + 2 / 2 / 100, 4 * 2 / (4 * 3) + 4 * 2 / 3 / 100
    assert found[0] == pytest.approx(of_first + of_second)
    assert found[1] == pytest.approx(16 * 2 / (4 * 25) + 2 / 2 / 100 + 2 / (4 * 3) + 2 / 3 / 100)


@pytest.fixture(scope="module")
def buffered():
    method = "fedbuff:staleness=constant@buffer:size=3"
    return simulate(**SMALL, method=method, privacy="dp:clip=0.1,noise=3", engine="reference")


def most(run):
    return int(np.bincount(run.updates["client"]).max())


def planned(settings):
    """The run of these settings as planned, with uploads of equal weight: nothing is trained."""
    experiment = prepare(settings)
    schedule = experiment.schedule
    every = np.ones(len(schedule.job), bool)
    columns = {"client": schedule.client[schedule.job], "step": schedule.step, "weight": every / 3}
    run = make_run()._replace(settings=experiment.described, schedule=schedule, evaluations={"time": schedule.time})
    return run._replace(updates=columns | {"accepted": every, "used": every})


def test_a_buffered_run_counts_its_participations(buffered):
    (found,) = guarantees(buffered, delta=DELTA)
    step, client = buffered.updates["step"], buffered.updates["client"]
    twice = len(client) - len({*zip(step.tolist(), client.tolist())})
    spent = [sum(np.sum((step == s) & (client == c)) ** 2 for s in range(6)) / 9 for c in range(6)]
    assert found.epsilon == pytest.approx(library(max(spent) ** -0.5), rel=2e-3)
    assert found.participations <= most(buffered) and (twice == 0) <= (found.participations == most(buffered))
    assert found.delta_of == "given"
    usual = guarantees(buffered)[0]
    assert usual.delta == pytest.approx(6**-1.1) and usual.delta_of == "the default, 6 clients^-1.1"
    other = {"method": "fedmedian@buffer:size=3", "privacy": "dp:clip=0.1,noise=3,quantile=0.5"}
    (single,) = guarantees(buffered._replace(settings=buffered.settings | other), delta=DELTA)
    assert "uses single uploads" in single.how
    assert single.epsilon == pytest.approx(library(3.0, count=most(buffered)), rel=2e-3)


def test_rounds_have_a_bound_by_sampling_too_and_dp_sgd_one_for_examples():
    given = {"method": "fedavg:weighting=uniform@cohort:size=3", "privacy": "dp:clip=0.1,noise=3+dp_sgd:noise=2"}
    run = planned(Settings(**SMALL, **given))
    by_participation, by_sampling, of_example = guarantees(run, delta=DELTA)
    times = most(run)
    assert by_participation.epsilon == pytest.approx(library(3.0, count=times), 2e-3)
    assert by_sampling.epsilon == pytest.approx(sampled(3.0, 3, 6, 6, DELTA)) and by_sampling.client is None
    assert of_example.unit == "example" and of_example.participations == times  # jobs of one step
    assert of_example.epsilon == pytest.approx(library(2.0, count=times), 2e-3)
    disturbed, stopped = (
        guarantees(run._replace(settings=run.settings | change))
        for change in ({"faults": "drop:probability=0.1"}, {"stop_at": 0.9})
    )
    assert len(disturbed) == 2  # not by sampling
    assert [(one.unit, one.epsilon) for one in stopped] == [("client", None), ("example", None)]
    assert all("stop_at" in one.how for one in stopped)


def sharing(order, clients=4, method="fedavg", **changed):
    """A run with DP-SGD of all clients in each of three rounds; ``order``: the ten examples of each client."""
    x, y = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32), np.arange(40, dtype=np.int32) % 2
    offset, size = np.arange(clients) * 10, np.full(clients, 10)
    data = FederatedData("shared", x, y, np.ravel(order), offset, size, x, y, lambda rows: rows, 2)
    given = {"method": f"{method}@cohort:size=4", "privacy": "dp_sgd:noise=2", "server_steps": 3, "batch_size": 10}
    run = planned(Settings(dataset=data, model="logistic", clients=clients, eval_updates=12, **given | changed))
    return guarantees(run, delta=DELTA, dataset=data)[0]


def test_an_example_that_clients_share_is_used_by_each_of_them():
    apart, shared = sharing(np.arange(40)), sharing(np.tile(np.arange(10), 4))
    assert (apart.participations, shared.participations) == (3, 12)
    assert shared.epsilon == pytest.approx(library(2.0, count=12), rel=2e-3) and shared.epsilon > apart.epsilon
    twice = sharing([*range(9), 0, *range(10, 40)])
    assert twice.epsilon is None and "an example twice" in twice.how


def test_batches_in_stored_order_come_back_before_the_examples_are_over():
    """Ten examples are two whole batches of four: the third step of a job uses the first four again."""
    for method, uses in (("fedavg", 3), ("fedavg:shuffle=false", 6)):
        assert sharing(np.arange(40), method=method, batch_size=4, steps=3).participations == uses


@pytest.mark.parametrize(
    ("settings", "rejected", "stopped", "why"),
    [
        ({"privacy": "dp:noise=0"}, 0, None, "no bound: noise = 0"),
        ({}, 2, None, "no bound is known: 2 uploads were rejected"),
        ({"norm_limit": 3.0}, 0, None, "norm_limit"),
        ({"patience": 3}, 0, None, "patience"),
        ({}, 0, Stopped("callback f", "good enough", 1), "stopped by callback f, which"),
        ({"attack": "alie:share=0.2"}, 0, None, "forge"),
        ({"attack": "sign_flip:share=0.2"}, 0, None, None),  # it does not read other uploads
    ],
)
def test_where_no_bound_is_known_it_says_so(buffered, settings, rejected, stopped, why):
    updates = buffered.updates | {"accepted": np.arange(18) >= rejected}
    run = buffered._replace(settings=buffered.settings | settings, updates=updates, stopped=stopped)
    (found,) = guarantees(run, delta=DELTA)
    assert (found.epsilon is None) == (why is not None) and (why or "") in found.how


def test_code_that_a_folder_names_is_not_run(buffered, tmp_path):
    """Plugins of a finished run must be given again, by ``--plugin``: somebody else may have made the folder."""
    folder = save(buffered, tmp_path / "run")
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "plugins.json").write_text(f'["{tmp_path / "code.py"}"]')
    (tmp_path / "code.py").write_text("raise RuntimeError")
    assert guarantees(folder, delta=DELTA) == guarantees(buffered, delta=DELTA)


def test_the_command_says_what_saved_runs_guarantee(buffered, tmp_path, capsys):
    folder = str(save(buffered, tmp_path / "run"))
    assert cli.main(["privacy", folder, "--delta", "1e-5"]) == 0
    assert capsys.readouterr().out.startswith(f"{folder}: client: epsilon = ")
    assert cli.main(["privacy", folder]) == 0
    assert "at delta = 0.139 (the default, 6 clients^-1.1)\n" in capsys.readouterr().out
    for delta in ("2.0", "0.0"):
        assert cli.main(["privacy", folder, "--delta", delta]) == 2
        assert f"delta = {delta}: must be above 0 and below 1" in capsys.readouterr().err
    plain = {name: value for name, value in buffered.settings.items() if name != "privacy"}
    assert "privacy = None: must be dp or dp_sgd" in refusal(guarantees, buffered._replace(settings=plain))
