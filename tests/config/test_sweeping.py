"""Sweeps: which runs share a program, and that sharing changes no result."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from fedjax_async import Settings
from fedjax_async.config import execute, execute_group, plan_groups, prepare
from fedjax_async.config.problem import data_of, read_data
from tests.results.folders import Killed
from tests.told import is_refused

BASE = Settings(
    method="fedasync", model="logistic", clients=4, delay="exponential", updates=30, eval_updates=10, steps=3
)


def varied(*changes):
    return [replace(BASE, **change) for change in changes]


def seeded(number):
    return varied(*({"seed": seed} for seed in range(number)))


def swept(settings):
    found = {}
    for group in plan_groups(settings):
        execute_group(settings, group, on_finished=found.__setitem__)
    return [found[i] for i in range(len(settings))]


def equal(a, b, rtol=2e-5):
    for x, y in zip(jax.tree.leaves(a.params), jax.tree.leaves(b.params), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=rtol * max(np.abs(y).max(), 1e-3))
    for name in ("time", "update", "step", "loss", "bytes_up"):
        np.testing.assert_allclose(a.evaluations[name], b.evaluations[name], rtol=1e-4)
    for name in ("client", "staleness", "arrival_time", "accepted"):
        np.testing.assert_array_equal(a.updates[name], b.updates[name])
    assert a.settings == b.settings


def test_everything_that_may_vary_inside_a_group():
    first = execute(prepare(BASE))
    settings = varied(
        {},
        {"method": "fedasync:mixing=0.2,exponent=0.7", "seed": 3},
        {"method": "fedasync:mixing=0.2,exponent=0.9"},
        {"delay": "lognormal:sigma=1", "lr": 0.5},
        {"partition": "iid", "updates": 17},
        {"norm_limit": float(np.median(first.updates["upload_norm"]))},
        {"faults": "corrupt:probability=0.3"},
    )
    # an exponent that is given is traced, the default is not; with corrupt uploads not every arrival closes a step
    assert sorted(sorted(group.members) for group in plan_groups(settings)) == [[0, 3, 4, 5], [1, 2], [6]]
    varying = [settings[i] for i in (0, 3, 4, 5)]
    runs = swept(varying)
    for alone, have in zip((first, *map(execute, map(prepare, varying[1:]))), runs, strict=True):
        equal(have, alone)
    assert runs[3].counters["rejected"] > 0


def test_static_differences_make_groups_of_their_own():
    changes = [{}, {"model": "mlp"}, {"method": "fedbuff@buffer:size=3"}, {"clients": 6}, {"batch_size": 8}]
    changes += [{"optimizer": "sgd:momentum=0.5"}, {"engine": "reference"}, {"engine": "reference", "seed": 1}]
    groups = plan_groups(varied(*changes))
    assert len(groups) == len(changes) and {group.updates for group in groups} == {30}


def test_memory_decides_how_many_run_side_by_side_and_counts_no_jobs_that_were_called_off():
    settings = seeded(12)
    wide, one = (plan_groups(some, lanes=1)[0] for some in (settings, settings[:1]))
    assert len(wide.stacks) < 12 and wide.num_bytes > one.num_bytes
    narrow = plan_groups(settings, memory_limit=one.num_bytes + 1000, lanes=1)[0]
    assert len(narrow.stacks) == 12 and sorted(sum(narrow.stacks, ())) == list(range(12))
    is_refused("memory_limit = 1000: must be at least", plan_groups, settings, memory_limit=1000)
    given = {"method": "fedavg@cohort:size=2,over_selection=8", "model": "lenet5", "clients": 20}
    long = replace(BASE, **given, updates=8000, eval_updates=2000)
    (group,) = plan_groups([long], memory_limit=2**29, lanes=1)
    assert group.num_bytes < 60e6  # 33,200 jobs were sent; the data are 4.7 MB, the model 0.25 MB


def test_fewer_stacks_at_a_time_where_memory_asks_for_it(monkeypatch):
    """If the number of stacks is given, it is an error instead."""
    monkeypatch.setattr("fedjax_async.config.sweeping.default_lanes", lambda: 4)
    settings = seeded(4)
    assert plan_groups(settings)[0].lanes == 4
    one, two = (plan_groups(settings[:n], lanes=n)[0].num_bytes for n in (1, 2))
    limit = int(one + 2.5 * (two - one))
    tight = plan_groups(settings, memory_limit=limit)[0]
    assert tight.lanes == 3 and tight.num_bytes <= limit
    is_refused(f"memory_limit = {limit}: must be at least", plan_groups, settings, memory_limit=limit, lanes=4)


@pytest.mark.parametrize(("runs", "lanes", "batches"), [(1, 1, 2), (2, 2, 1), (3, 1, 2), (4, 2, 1)])
def test_a_group_that_cannot_be_shared_out_evenly_trains_two_batches_of_one_stack(runs, lanes, batches):
    groups = plan_groups(seeded(runs), lanes=2)
    assert [(group.lanes, group.batches) for group in groups] == [(lanes, batches)]


def test_what_is_left_of_a_group_goes_on_from_its_checkpoints(tmp_path, monkeypatch):
    """Tables are as long as those of the longest stack, also when that one is finished."""
    monkeypatch.setattr("fedjax_async.config.sweeping.CHECKPOINT_UPDATES", 10)
    settings, found, done = seeded(3), {}, []
    want = swept(settings)
    group = plan_groups(settings)[0]._replace(stacks=((0, 1), (2,)), lanes=1, batches=1)

    def killer(updates, total, **status):
        done.append(updates)
        if updates > 85:
            raise Killed

    start = partial(execute_group, settings, on_finished=found.__setitem__, folder=tmp_path)
    with pytest.raises(Killed):
        start(group, progress=killer)
    assert sorted(found) == [0, 1] and list(tmp_path.glob("*/*.npz"))
    first = len(done)
    left = group.left(found)
    assert left.members == (2,) and left.updates == 30
    start(left, progress=lambda n, of, **s: done.append(n))
    assert min(done[first:]) > 20, "it went on"
    for i, one in enumerate(want):
        jax.tree.map(np.testing.assert_array_equal, found[i].params, one.params)


def test_runs_share_the_examples_however_many_data_sets_are_read_between():
    one = data_of(BASE)
    for count in range(3, 9):
        read_data(f"synthetic:features={count}")
    assert data_of(replace(BASE, seed=1)).x is one.x
