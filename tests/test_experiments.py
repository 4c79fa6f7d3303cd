"""Every experiment runs: each script at its smallest size, as a user would start it."""

from __future__ import annotations

import warnings

import jax
import pytest

from tests import forked
from tests.experiment import EXPERIMENTS, module

# the others are imported by them
MAIN = 'if __name__ == "__main__":'
SCRIPTS = sorted(path for path in EXPERIMENTS.glob("*/*.py") if MAIN in path.read_text(encoding="utf-8"))
# These take longest, and the other scripts call the same functions.
LONG = {"centroids", "compressors", "conv", "peer_planning", "population", "sweep", "trajectory"}  # benchmarks
LONG |= {"versions", "outcomes", "peers"}  # two checkouts, PyTorch's loops
LONG |= {"figure_2", "figure_4", "figure_5", "figure_6", "figure_8", "figure_9", "figure_10", "table_3", "table_7"}
LONG |= {"tuning", "times", "steps", "quantisers", "signs", "partitions", "figure_3"}
LONG |= {"figure_1_3", "table_methods", "antisymmetry", "tuned_staleness", "fixed_point", "rates"}
LONG |= {"table", "dp_fedavg"}  # rules against attacks, DP-FedAvg
LONG |= {"learn", "worlds", "policies", "defaults", "claims"}  # policies, and what they cost; methods at their defaults
LONG |= {"comparison", "gpu_programs"}  # tests/test_comparison.py runs it, tests/test_gpu_programs.py its small run
PARTS = {
    "table_1": ("--variants", "fedavg", "orthofl_released"),
    "tables": ("--tables", "1"),
    "accelerator": ("--queue", "--only", "memory, logistic", "profile, MLP-64, constant"),
}  # the parts of long scripts that CI runs; the whole scripts are slow tests
WHOLE = {"accelerator": ("--queue", "--together", "2", "--minutes", "60")}


def scripts(benchmarks):
    """The scripts of the benchmarks, or of the papers, with options: slow tests if they are long, else of the book."""
    found = []
    for path in SCRIPTS:
        if (path.parent.name == "benchmarks") == benchmarks:
            part = PARTS.get(path.stem, ())
            long = path.stem in LONG or bool(part)
            found += [pytest.param(path, part, id=f"{path.stem}-part", marks=pytest.mark.book)] if part else []
            whole = WHOLE.get(path.stem, ())
            found += [pytest.param(path, whole, id=path.stem, marks=pytest.mark.slow if long else pytest.mark.book)]
    return found


def check_table(path):
    assert path.read_text().count("\n") > 1, "a table with at least one row"
    assert "hardware" in path.read_text().splitlines()[0]


def start(script, *options, cwd):
    """Run a script in a process of its own."""
    done = forked.python([str(script), *map(str, options)], cwd=cwd, timeout=3600)  # on a busy machine too
    assert done.returncode == 0, done.stderr


def call(script, *options, **_):
    """Run a script in this process, whose programs it shares, without the tests' strict mode."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"), warnings.catch_warnings():
        warnings.simplefilter("default")
        ended = module("", "scripts").call(script, [*map(str, options)])
    assert ended.code == 0, ended.stderr


# at their smallest size, compilation takes longer than the run
@pytest.mark.usefixtures("commands_compile_as_here")
@pytest.mark.parametrize(("script", "part"), scripts(benchmarks=True))
def test_benchmark(script, part, tmp_path):
    start(script, "--smoke", *part, "--out", tmp_path / "table.csv", cwd=tmp_path)
    found = tmp_path / "table.csv"  # a folder of tables, if the script writes several
    for path in found.glob("*.csv") if found.is_dir() else [found]:
        check_table(path)


@pytest.mark.usefixtures("commands_compile_as_here", "nothing_stays_registered")
@pytest.mark.parametrize(("script", "part"), scripts(benchmarks=False))
def test_paper(script, part, tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    run = start if request.node.get_closest_marker("slow") else call
    run(script, "--scale", "smoke", "--quiet", *part, "--out", tmp_path / "out", cwd=tmp_path)
    check_table(tmp_path / "out" / f"{script.stem}.csv")
    assert "not run" not in (tmp_path / "out" / f"{script.stem}.md").read_text()
