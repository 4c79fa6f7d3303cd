"""What changes numbers in JAX, and plugins: recorded; another value is refused, or said where only rounding differs."""

from __future__ import annotations

import shutil

import jax
import numpy as np
import pytest

from fedjax_async import Stop, cli, compare, simulate
from fedjax_async.base import notices
from fedjax_async.config import plugins
from fedjax_async.engine import checkpoint
from fedjax_async.engine.checkpoint import Keeper, Snapshot
from fedjax_async.results import explain, provenance
from tests.results.test_input_files import SMALL, as_by_an_older_version, delays

OTHER = {
    "jax_enable_x64": True,
    "jax_default_prng_impl": "rbg",
    "jax_threefry_partitionable": False,
    "jax_random_seed_offset": 1,
}
ROUNDED = {"jax_default_matmul_precision": "highest", "XLA_FLAGS": "--xla_cpu_enable_fast_math=true"}


def test_the_settings_of_jax_that_change_numbers_are_recorded(monkeypatch):
    assert set(OTHER) == set(checkpoint.numerics()) and set(ROUNDED) == set(checkpoint.rounding())
    usual = checkpoint.numerics() | checkpoint.rounding()
    assert usual.items() <= provenance.versions().items()
    monkeypatch.setenv("XLA_FLAGS", f"{ROUNDED['XLA_FLAGS']} --xla_dump_to=somewhere")
    draws = jax.default_prng_impl("rbg"), jax.threefry_partitionable(False)
    with jax.enable_x64(True), draws[0], draws[1], jax.default_matmul_precision("highest"):
        found = checkpoint.numerics() | checkpoint.rounding()
    assert found == OTHER | ROUNDED | {"jax_random_seed_offset": 0}


@pytest.mark.parametrize("name", [*OTHER, *ROUNDED])
def test_a_checkpoint_under_another_setting_of_jax_is_refused_or_said_by_name(tmp_path, monkeypatch, name):
    Keeper(tmp_path, 1, {}).save(1, Snapshot(1, [], {}))
    which, value = ("numerics", OTHER) if name in OTHER else ("rounding", ROUNDED)
    usual = getattr(checkpoint, which)()
    monkeypatch.setattr(checkpoint, which, lambda: usual | {name: value[name]})
    text = f"{name} = {value[name]!r}, saved {usual[name]!r}"
    if name in OTHER:
        with pytest.raises(ValueError) as error:
            Keeper(tmp_path, 1, {}).restore()
        assert f"its JAX settings differ: {text};" in str(error.value)
    else:
        with pytest.warns(notices.RunWarning) as said:
            Keeper(tmp_path, 1, {}).restore()
        assert len(said) == 1 and f"other rounding: {text} (the same numbers to rounding" in str(said[0].message)


def test_a_finished_run_of_other_numbers_is_not_read(tmp_path, monkeypatch, capsys, made_at_once):
    out = tmp_path / "run"
    simulate(**SMALL, out=out, plots=False)
    usual = provenance.numerics()
    with monkeypatch.context() as other:
        other.setattr(provenance, "numerics", lambda: usual | {"jax_threefry_partitionable": False})
        for train in (lambda: simulate(**SMALL, out=out, plots=False), lambda: adding(tmp_path)):
            with pytest.raises(ValueError, match=r"jax_threefry_partitionable = False, saved True.*--again"):
                train()
        capsys.readouterr()
        simulate(**SMALL, out=out, plots=False, again=True)
        assert "was read" not in capsys.readouterr().out
        simulate(**SMALL, out=out, plots=False)  # it was recorded with these
    simulate(**SMALL, out=out, plots=False, again=True)
    other = checkpoint.rounding() | {"jax_default_matmul_precision": "highest"}
    monkeypatch.setattr(provenance, "rounding", lambda: other)
    simulate(**SMALL, out=out, plots=False)
    told = capsys.readouterr().out
    assert "computed with jax_default_matmul_precision = 'highest', saved None (the same numbers to rounding" in told


def adding(folder):
    """Compare, into the folder of a comparison with one method, this and another method."""
    if not (folder / "two").exists():
        shutil.copytree(folder / "run", folder / "two" / "runs" / "fedasync" / "seed_0")
    compare(["fedasync", "asgd"], **SMALL, out=folder / "two", plots=False, progress=False)


def test_a_plugin_that_changed_besides_its_code_is_said(tmp_path, monkeypatch):
    for content in ("one", "two"):
        monkeypatch.setattr(plugins, "LOADED", {str(tmp_path / "mine.py"): content})
        keeper = Keeper(tmp_path / "kept", 1, {"plugins": plugins.digests()})
        if content == "one":
            keeper.save(1, Snapshot(1, [], {}))
            before = provenance.versions()
    with pytest.warns(notices.RunWarning, match=r"other plugins: mine\.py = .*have the same code"):
        keeper.restore()
    assert before["plugin mine.py"] != provenance.versions()["plugin mine.py"]


def test_a_repeated_run_with_other_arrivals_is_far_from_the_saved_one(tmp_path, capsys):
    given = {name: value for name, value in SMALL.items() if name != "updates"} | {"time": 3.5}
    simulate(**given, **delays(tmp_path, 3), out=tmp_path / "run", plots=False)
    as_by_an_older_version(tmp_path / "run")
    delays(tmp_path, 1)
    assert cli.main(["explain", str(tmp_path / "run"), "--quiet", "--examples", "20"]) == 0
    told = next(line for line in capsys.readouterr().out.splitlines() if "away from the saved" in line)
    assert "delays.csv changed since is not known" in told and "machine" not in told


def test_an_explanation_of_a_stopped_run_is_read_again(tmp_path):
    stops = [lambda evaluation: Stop("enough") if evaluation.number == 2 else None]
    simulate(**SMALL | {"eval_updates": 1}, callbacks=stops, out=tmp_path / "run", plots=False)
    folder = tmp_path / "explained"
    first, second = (explain(tmp_path / "run", examples=20, out=folder, say=str) for _ in range(2))
    assert np.isnan(first.drift) and np.isnan(second.drift) and second[1:4] == first[1:4]
