"""Probes: what they see, in both engines, how it is saved, and that they change nothing."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_async import Settings, simulate, sweep
from fedjax_async.base import tree
from fedjax_async.config import execute, plan_groups, prepare
from fedjax_async.engine import run_reference, run_waves
from fedjax_async.engine.checkpoint import Keeper
from fedjax_async.local import mean_loss
from fedjax_async.results import load, save
from fedjax_async.results.simulation import run_alone
from fedjax_async.types import ClientData, Probe
from tests.engine.problem import MODEL, Killed, changed, data, killer, near, personal, same
from tests.refusals import refusals


def validated(who, first=0):
    """The data with validation parts of 0, 1, 2 ... rows, and with one test row fewer per client."""
    size = np.arange(len(who.size), dtype=np.int32)
    offset = (np.cumsum(size) - size).astype(np.int32)
    order = ((np.arange(size.sum()) + first) % len(who.x)).astype(np.int32)
    return who._replace(
        validation_order=order, validation_offset=offset, validation_size=size, test_size=who.test_size - 1
    )


def everything(state, memory, arrival, parts):
    """Depends on all four arguments and on all three parts."""
    after = jax.tree.map(jnp.add, arrival.start, arrival.upload)
    return {
        "train": mean_loss(MODEL, state["x"], parts.train, batch_size=4),
        "validation": mean_loss(MODEL, after, parts.validation, batch_size=3),
        "test": mean_loss(MODEL, arrival.start, parts.test),
        "memory": tree.norm(memory),
        "extra": arrival.extra,
        "staleness": arrival.staleness,
        "fresh": arrival.staleness == 0,
        "constant": 1.5,
    }


def staleness(state, memory, arrival, parts):
    return {"tau": arrival.staleness}


def norms(state, memory, arrival, parts):
    return {"memory": tree.norm(memory)}


PROBES = {"all": everything, "some": Probe(staleness, every=4), "few": Probe(norms, at=[7, 0, 12])}


def problem(**options):
    given = personal("buffer:size=3", faults="drop:probability=0.3", **options)
    return changed(given, data=validated(data()))


def agree(have, want, rtol=0.0):
    """Assert that the tables of probes have the same columns, with about the same values of the same types."""
    assert have.keys() == want.keys()
    for name, table in want.items():
        assert list(have[name]) == list(table)
        near(have[name], table, rtol, rtol)
        assert {c: have[name][c].dtype for c in table} == {c: values.dtype for c, values in table.items()}, name


@pytest.mark.slow
@pytest.mark.float64
def test_engine_equals_oracle_the_run_is_unchanged_and_a_resumed_one_has_the_same_tables(tmp_path):
    given, loop = problem(), {"batching": "loop"}
    want, plain = run_reference(*given, probes=PROBES), run_waves(*given, **loop)
    assert len(want.in_vain) > 0, "some uploads of clients that keep state must be lost"
    have = run_waves(*given, **loop, probes=PROBES)
    agree(have.probes, want.probes, rtol=1e-9)
    same((have.params, have.scores, have.records), (plain.params, plain.scores, plain.records))
    every, some, few = (want.probes[name] for name in PROBES)
    for table, position in ((every, np.arange(24)), (some, np.arange(0, 24, 4)), (few, [0, 7, 12])):
        np.testing.assert_array_equal(table["update"], position)
    np.testing.assert_array_equal(few["memory"], every["memory"][[0, 7, 12]])
    schedule = given.schedule
    for name, values in {
        "client": schedule.client[schedule.job], "time": schedule.time, "staleness": schedule.staleness
    }.items():  # fmt: skip
        np.testing.assert_array_equal(every[name], values)
    assert (np.isnan(every["validation"]) == (every["client"] == 0)).all()
    assert every["fresh"].dtype == np.bool_ and (every["constant"] == 1.5).all()
    assert len(set(every["memory"])) > 5

    with pytest.raises(Killed):
        run_waves(*given, **loop, probes=PROBES, keeper=Keeper(tmp_path, 3, {}), progress=killer(17))
    for others in ({}, {"all": everything}, PROBES | {"some": Probe(staleness, every=5)}):
        with pytest.raises(ValueError, match="probes differ"):
            run_waves(*given, **loop, probes=others, keeper=Keeper(tmp_path, 3, {}))
    keeper = Keeper(tmp_path, 3, {})
    assert keeper.restore().turns > 0
    agree(run_waves(*given, **loop, probes=PROBES, keeper=keeper).probes, have.probes)


SMALL = {"model": "logistic", "clients": 4, "updates": 9, "steps": 2, "delay": "exponential", "batch_size": 8}


def sizes(state, memory, arrival, parts):
    return {name: getattr(parts, name).size for name in parts._fields} | {"norm": tree.norm(arrival.start)}


def test_simulated_saved_and_loaded(tmp_path):
    options = SMALL | {"validation_fraction": 0.25, "test_fraction": 0.1, "partition": "iid"}
    probes = {"sizes": sizes, "late": Probe(sizes, at=(8,))}
    run = simulate(probes=probes, **options)
    table = run.probes["sizes"]
    assert set(table) == {"update", "client", "time", "train", "validation", "test", "norm"}
    # 5,000 examples: 1,250 a client, 125 for its test, 281 of the other 1,125 for validation
    assert set(table["train"]) == {844} and set(table["validation"]) == {281} and set(table["test"]) == {125}
    np.testing.assert_array_equal(table["client"], run.updates["client"])
    np.testing.assert_array_equal(table["time"], run.updates["arrival_time"])
    agree(load(save(run, tmp_path / "a")).probes, run.probes)
    experiment = prepare(Settings(**options, checkpoint=4), probes=probes)
    again = run_alone(experiment, tmp_path / "b", plots=False)
    agree(again.probes, run.probes)
    agree(load(tmp_path / "b").probes, run.probes)
    plain = simulate(**options)
    assert plain.probes == {} and load(save(plain, tmp_path / "c")).probes == {}
    assert not (tmp_path / "c" / "probes.npz").exists()
    same(plain.params, run.params)


def test_start_models_kept_at_half_precision_are_seen_in_full():
    def starting(state, memory, arrival, parts):
        assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(arrival.start))
        return {"norm": tree.norm(arrival.start)}

    assert len(simulate(probes={"start": starting}, slots="bfloat16", **SMALL).probes["start"]["norm"]) == 9


def test_every_run_of_a_sweep_has_its_own_tables(tmp_path):
    probes, base = {"sizes": Probe(sizes, every=2)}, SMALL | {"validation_fraction": 0.2}
    found = sweep(base, {"lr": [0.01, 0.2]}, seeds=2, lanes=1, probes=probes, progress=False)
    (group,) = plan_groups(list(found.settings), probes=probes, lanes=1)
    assert len(group.stacks) == 1, "runs with other partitions, side by side"
    tables = [run.probes for run in found.runs]
    agree(tables[3], execute(prepare(found.settings[3], probes=probes)).probes, rtol=1e-5)
    assert found.settings[0].seed != found.settings[1].seed
    for one, other in ((0, 1), (0, 2)):
        assert any(not np.array_equal(tables[one]["sizes"][k], tables[other]["sizes"][k]) for k in ("train", "norm"))
    for _ in range(2):
        kept = sweep(base, seeds=[0], out=tmp_path, probes=probes, progress=False)
        assert list(kept.run(0).probes) == ["sizes"]
    with pytest.raises(ValueError, match="another sweep"):
        sweep(base, seeds=[0], out=tmp_path, progress=False)


def test_mean_loss_is_the_mean_over_the_part():
    who, params = data(), MODEL.init(jax.random.key(4))
    found = jax.jit(lambda params, part, batch_size: mean_loss(MODEL, params, part, batch_size), static_argnums=2)
    x, y, order = jnp.asarray(who.x, jnp.float32), jnp.asarray(who.y), jnp.asarray(who.order)
    losses = np.asarray(jax.jit(lambda params: MODEL.loss(MODEL.apply(params, x), y))(params))
    for i, size in enumerate(who.size):
        part = ClientData(x, y, order, who.offset[i], size)
        want = np.mean(losses[who.order[who.offset[i] : who.offset[i] + size]])
        for batch_size in (1, 4, 13, 256):
            np.testing.assert_allclose(found(params, part, batch_size), want, rtol=1e-5)
    assert np.isnan(found(params, part._replace(size=np.int32(0)), 256))


def gives(value):
    return lambda state, memory, arrival, parts: value


@pytest.mark.parametrize(
    ("probes", "words"),
    [
        ([everything], r"^probes = .*: must be a dict"),
        ({"a/b": staleness}, r"^probe name = 'a/b': must be"),
        ({"": staleness}, r"^probe name = ''"),
        ({"a": 3}, r"^probes\['a'\] = 3: must be a function or a Probe"),
        ({"a": Probe(None)}, r"^probes\['a'\] = Probe.*: must be"),
        ({"a": Probe(staleness, every=0)}, r"^probes\['a'\]\.every = 0: must be a whole number >= 1"),
        ({"a": Probe(staleness, every=1.5)}, r"^probes\['a'\]\.every = 1\.5"),
        ({"a": Probe(staleness, every=2, at=[1])}, r"^probes\['a'\]\.every = 2: must be left out where at is given"),
        ({"a": Probe(staleness, at=3)}, r"^probes\['a'\]\.at = 3: must be a list"),
        ({"a": Probe(staleness, at=[9])}, r"^probes\['a'\]\.at = 9: must be a whole number from 0 to 8"),
        ({"a": Probe(staleness, at=[-1])}, r"^probes\['a'\]\.at = -1"),
        ({"a": gives(1.0)}, r"^probes\['a'\] = 1\.0: must be a function"),
        ({"a": gives({})}, r"^probes\['a'\] = {}"),
        ({"a": gives({"b": np.zeros(3)})}, r"^probes\['a'\]\['b'\]\.shape = \(3,\): must be \(\)"),
        ({"a": gives({"b": "text"})}, r"^probes\['a'\]\['b'\] = 'text': must be a number"),
        ({"a": gives({"b/c": 1.0})}, r"^column of probes\['a'\] = 'b/c'"),
        ({"a": gives({"time": 1.0})}, r"^column of probes\['a'\] = 'time': must be named other than"),
    ],
)
def test_bad_probes_are_refused_before_anything_is_compiled(probes, words):
    with pytest.raises(ValueError, match=words) as error:
        prepare(Settings(**SMALL), probes=probes)
    assert "\n" not in str(error.value)
    given = problem(updates=9)
    for engine in (run_waves, run_reference):
        with pytest.raises(ValueError, match=words):
            engine(*given, probes=probes)


FIVE = SMALL | {"clients": 5}
OWN = data()._replace(x=data().x.astype(np.float32), test_x=data().test_x.astype(np.float32))
STREAMED = {"data": OWN._replace(streamed=True), "probes": {"a": staleness}}
test_data_that_cannot_be_cut_or_seen_are_refused = refusals(
    ({"test_fraction": 0.2}, {"data": OWN}, r"^test_fraction = 0\.2: must be left out with data of your own"),
    ({}, STREAMED, r"^probes = \['a'\]: must be left out"),
    ({"validation_fraction": 1.0}, {}, r"^validation_fraction = 1\.0: must be"),
    by=lambda settings, parts: prepare(Settings(**FIVE, **settings), **parts),
)
