"""The comparison of methods: its statistics, its search spaces, its problem with a known optimum, its command."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from fedjax_async.data import check_data
from fedjax_async.server import METHODS
from tests import forked
from tests.experiment import EXPERIMENTS, comparing
from tests.results.made_up import make_run

SCRIPT = EXPERIMENTS / "comparison" / "comparison.py"


@pytest.fixture(scope="module")
def files():
    yield from comparing("comparison", "comparison")


# --- statistics --------------------------------------------------------------------------------------


def demsars(order):
    """His equations of section 3.2.2 for ranks without ties: chi^2 and F."""
    blocks, methods = order.shape
    squares = sum(mean**2 for mean in order.mean(axis=0)) - methods * (methods + 1) ** 2 / 4
    chi_square = 12 * blocks / (methods * (methods + 1)) * squares
    return chi_square, (blocks - 1) * chi_square / (blocks * (methods - 1) - chi_square)


def test_friedmans_statistic_is_demsars(files):
    """His example has 14 data sets and 4 classifiers: mean ranks 3.143, 2, 2.893, 1.964 give 9.28 and 3.69."""
    example = np.tile([3.143, 2.000, 2.893, 1.964], (14, 1))
    assert demsars(example) == pytest.approx((9.28, 3.69), abs=0.01)
    order = np.array([np.random.default_rng(seed).permutation(4) + 1.0 for seed in range(14)])
    found = files.ranks.friedman(order)
    assert (found.chi_square, found.f) == pytest.approx(demsars(order))


def test_friedmans_statistic_with_ties_by_hand(files):
    """Sums of ranks 2.5, 4, 5.5 have squares 4.5 about 4; all ranks have squares 3 about 2."""
    order = files.ranks.ranked(np.array([[0.9, 0.1, 0.1], [0.5, 0.5, 0.2]]))
    np.testing.assert_array_equal(order, [[1, 2.5, 2.5], [1.5, 1.5, 3]])
    found = files.ranks.friedman(order)
    assert (found.chi_square, found.f) == (3.0, 3.0)
    assert found.p == pytest.approx((1 + 3.0) ** -1), "F with 2 and 2 degrees of freedom"


def test_critical_differences_have_the_published_quantiles(files):
    """Demsar 2006, table 5, for 2 to 10 methods."""
    found = [files.ranks.critical_difference(n, 14) / math.sqrt(n * (n + 1) / (6 * 14)) for n in range(2, 11)]
    assert found == pytest.approx([1.960, 2.343, 2.569, 2.728, 2.850, 2.949, 3.031, 3.102, 3.164], abs=1e-3)


def test_friedman_of_agreeing_and_of_equal_blocks(files):
    agreeing = files.ranks.friedman(np.tile([1.0, 2.0, 3.0], (5, 1)))
    assert (agreeing.chi_square, agreeing.f) == (10.0, math.inf)
    assert agreeing.p == pytest.approx(6.0**-4), "four blocks repeat the first one's order, one of six"
    tied = files.ranks.friedman(np.tile([1.5, 1.5, 3.0], (3, 1)))
    assert tied.p == pytest.approx(3.0**-2), "one of three orders with a tie at the top"
    assert math.isnan(files.ranks.friedman(np.array([[1.0, 2.0, 3.0]])).p), "one block agrees with itself"
    assert files.ranks.friedman(np.full((5, 3), 2.0)) == (0.0, 0.0, 1.0)
    with pytest.raises(ValueError, match="methods = "):
        files.ranks.friedman(np.ones((5, 1)))


def test_scores_of_other_units_count_alike_against_the_control(files):
    """Two groups of blocks, one in percent: the same differences in units of the deviation between methods."""
    one = np.array([[0.0, 0.2, 0.4], [0.1, 0.3, 0.5], [0.0, 0.2, 0.4]])
    scores, groups = np.concatenate([one, 100 * one]), np.repeat(["a", "b"], 3)
    unit = math.sqrt(((0.2**2) * 2) / 3)  # of means 1/30, 7/30, 13/30
    found = files.ranks.against(scores, groups, control=1)
    assert [each.difference for each in found] == pytest.approx([-0.2 / unit, 0, 0.2 / unit])
    # six differences of one sign: 2 / 2^6; Holm doubles the smaller one, and the other is not below it
    assert [found[k].p for k in (0, 2)] == pytest.approx([1 / 32, 1 / 32])
    assert [found[k].corrected for k in (0, 2)] == pytest.approx([1 / 16, 1 / 16])
    assert math.isnan(found[1].p)
    spoilt = scores.copy()
    spoilt[0, 2] = math.nan  # one method has no score in a block: the others keep theirs there
    first, _, last = files.ranks.against(spoilt, groups, control=1)
    assert first.difference == pytest.approx((-0.2 / 0.1 - 0.2 / unit) / 2)  # of means 1/30 and 7/30, and as before
    assert first.p == 1 / 32 and math.isnan(last.difference) and math.isnan(last.p)


def test_numbers_of_a_curve_by_hand(files):
    summary, scores = files.summary, np.array([0.1, 0.5, 0.3, 0.7, 0.6, 0.8])
    assert summary.area(scores) == pytest.approx((0.1 + 0.5 + 0.3 + 0.7 + 0.6) / 5)
    assert summary.final(scores) == 0.8
    assert summary.final(np.arange(20.0)) == 18.5, "the last tenth of 20 evaluations"
    assert summary.fluctuation(scores) == pytest.approx(0.1)
    assert summary.first_at(scores, 0.6, smaller=False) == 3
    assert summary.first_at(-scores, -0.5, smaller=True) == 1
    assert summary.first_at(scores, 0.9, smaller=False) is None
    # the cost of a target is that of the first evaluation that reaches it
    assert summary.cost(kept_run(files, "asgd", 0, [0.1, 0.69, 0.7, 0.2, 0.9])) == (50.0, 4.0)
    assert all(map(math.isnan, summary.cost(kept_run(files, "asgd", 0, [0.1, 0.2]))))
    gap = kept_run(files, "asgd", 0, [0.0, -0.6, -0.4], task="logistic")  # log10(0.3) = -0.52
    assert summary.cost(gap) == (50.0, 2.0)


def kept_run(files, method, seed, scores, task="mlp"):
    sent = np.arange(len(scores)) * 2.0
    return files.kept.Kept(
        "devices", task, method, seed, f"{method}:server_lr=0.1", 0.05, 100.0, 40, 20, 1.5, 7, 0.25, np.array(scores),
        sent,
    )  # fmt: skip


def test_a_method_that_misses_a_block_has_no_rank_and_gaps_rank_from_below(files):
    runs = [kept_run(files, name, 0, [0.0, end]) for name, end in (("a", 0.9), ("b", 0.8), ("c", 0.7))]
    runs += [kept_run(files, name, 0, [0.0, end], task="logistic") for name, end in (("a", -1.0), ("b", -2.0))]
    table, methods, blocks, missing = files.summary.table_of_scores(runs)
    assert (methods, missing, len(blocks)) == (["a", "b"], ["c"], 2)
    np.testing.assert_array_equal(files.ranks.ranked(table), [[1, 2], [2, 1]])
    rows, numbers = files.summary.rank_rows(files.kept.Results(runs, [], []))
    assert [row["mean rank"] for row in rows] == [1.5, 1.5] and numbers["methods"] == 2


def test_results_come_back_from_their_files(files, tmp_path):
    kept = files.kept
    runs = [kept_run(files, "asgd", 3, kept.rounded([0.1, 1 / 3, math.nan]))]
    tried = [kept.Tried("devices", "mlp", "asgd", "asgd:server_lr=0.1", 0.05, math.nan, "yes")]
    refused = [kept.Refused("crowd", "har", "asgd", 'clients = 1000: too many, "really"')]
    kept.write(tmp_path, "small", kept.Results(runs, tried, refused))
    found = kept.read(tmp_path, "small")
    assert found.refused == refused and found.tried[0][:5] == tried[0][:5] and math.isnan(found.tried[0].validation)
    assert found.runs[0][:12] == runs[0][:12]
    np.testing.assert_array_equal(found.runs[0].scores, runs[0].scores)
    assert kept.without(found, ["asgd"]) == kept.Results([], [], [])
    (tmp_path / "small_tuning.csv").write_text("world,task\n")
    with pytest.raises(ValueError, match=r"small_tuning\.csv: must be a file of the comparison's runs"):
        kept.read(tmp_path, "small")


# --- spaces ------------------------------------------------------------------------------------------


def test_points_take_the_middle_of_a_range_then_its_quarters(files):
    """Of the logarithm: of 0.01 to 1 first 0.1; the local rate is the second option, in thirds of 0.4 to 4."""
    points = files.spaces.points("asgd", 0.05, 100, count=4, most_knobs=2)
    rates = [float(spec.partition("=")[2]) for spec, _ in points[1:]]
    np.testing.assert_allclose(rates, [10**-1, 10**-1.5, 10**-0.5], rtol=5e-3)
    local = [lr / 0.02 for _, lr in points[1:]]
    np.testing.assert_allclose(local, [10 ** (1 / 3), 10 ** (2 / 3), 10 ** (1 / 9)], rtol=5e-3)
    assert {lr for _, lr in files.spaces.points("asgd", 0.05, 100, count=4, most_knobs=1)} == {0.05}


def test_every_method_has_equally_many_points_and_those_of_timings_are_whole(files):
    """The default is first; options of timings are at most the number of clients, so points may be equal."""
    assert list(files.spaces.methods()) == [name for name, method in METHODS.items() if method.has_server]
    for name in files.spaces.methods():
        for clients in (10, 100):
            found = files.spaces.points(name, 0.05, clients, count=4, most_knobs=2)
            assert len(found) == 4 and found[0].spec == name and all(spec.startswith(name) for spec, _ in found)
            assert len(set(found)) >= 3
    sizes = [spec.rpartition("=")[2] for spec, _ in files.spaces.points("fedbuff", 0.05, 10, count=4, most_knobs=2)[1:]]
    assert sizes == ["6", "10", "4"]
    assert files.spaces.points("ringmaster", 0.05, 100, count=2, most_knobs=1)[1].spec == "ringmaster:server_lr=0.1"


# --- the logistic problem, worlds ------------------------------------------------------------------


def test_the_smallest_loss_is_what_gradient_descent_ends_at(files):
    rng = np.random.default_rng(1)
    x, y = rng.standard_normal((60, 2)), rng.integers(3, size=60)
    weights, inputs = np.zeros((3, 3)), np.concatenate([x, np.ones((60, 1))], axis=1)
    for _ in range(5000):
        p = np.exp(inputs @ weights)
        p /= p.sum(axis=1, keepdims=True)
        weights -= 0.5 * inputs.T @ (p - np.eye(3)[y]) / 60
    expected = -np.mean(np.log(p[np.arange(60), y]))
    assert files.logistic.smallest_loss(x, y, 3) == pytest.approx(expected, abs=1e-9)
    assert 0 <= files.logistic.smallest_loss(np.array([[-1.0], [1.0]]), np.array([0, 1]), 2) < 1e-8, "separable"
    entropy = -sum(share * math.log(share) for share in (0.5, 0.3, 0.2))  # where inputs say nothing
    found = files.logistic.smallest_loss(np.zeros((10, 0)), np.repeat([0, 1, 2], [5, 3, 2]), 3)
    assert found == pytest.approx(entropy, abs=1e-12)


def test_clients_of_the_problem_have_validation_rows_beside_those_they_train_on(files):
    data = check_data(files.logistic.dealt(7, 3, 0.3, 40))
    trained = np.concatenate([data.order[low : low + 40] for low in data.offset])
    held = np.concatenate([data.validation_order[low : low + 8] for low in data.validation_offset])
    assert sorted([*trained, *held]) == list(range(7 * 48))
    np.testing.assert_array_equal(data.test_x, data.x[trained])
    np.testing.assert_array_equal(data.test_y, data.y[trained])


def test_log_gaps_are_cut_off_and_the_worst_tenth_by_hand(files):
    """Class accuracies 1 and 0.5; shares of class 0 are 1, 0.5, 0: clients have 1, 0.75, 0.5, the worst 0.5.

    A diverged loss is the worst.
    """
    found = files.training.log_gap(np.array([1.5, 0.51, 0.5, math.nan, math.inf, 1e9]), 0.5)
    np.testing.assert_allclose(found, [0, -2, -7, 3, 3, 3], atol=1e-9)
    data = SimpleNamespace(
        test_y=np.array([0, 0, 1, 1]), num_classes=2, y=np.array([0, 0, 0, 1, 1, 1]), order=np.arange(6),
        offset=np.array([0, 2, 4]), size=np.array([2, 2, 2]),
    )  # fmt: skip
    assert files.training.worst_of(np.array([0, 0, 1, 0]), data) == 0.5


def test_the_staleness_that_is_kept_is_that_of_applied_updates(files):
    """The made-up run rejects its third upload, of staleness 2."""
    run = make_run()._replace(counters={"updates": 10, "server_steps": 10})
    run = run._replace(updates=run.updates | {"used": np.ones(11, bool)})
    block, point = files.scenes.Block("devices", "mlp", "smoke"), files.spaces.Point("fedasync", 0.1)
    found = files.training._kept(run, block, "fedasync", point, 0, 0.5)
    assert (found.staleness, found.longest) == (0.9, 4)


def leaving(client, time):
    return (math.inf, math.inf) if client == 0 and time >= 1 else (0.0, 1.0 if client == 0 else math.inf)


def four_of_ten(client, time):
    turn = 10 * ((time + 6) // 10)
    return turn, turn + 4


def test_measures_of_a_world(files):
    """Without noise all ten clients are in time, and a round takes a mean job and the break.

    Then the mean job is 2.5 s, so the deadline 5 s: jobs of 4 s are in time, jobs of 9 s never.
    """
    h, even = files.heterogeneity, {"clients": 10, "delay": "constant:mean=30"}
    assert h.measures(even, rounds=50, trips=100) == {"DevMC-R": 1.0, "DevMC-T": pytest.approx((1 + 1 / 3) / (1 / 3))}
    assert h.speed_spread(even) == 0
    clients = h.Clients(2, lambda client, number: (1.0, 4.0)[client], None, 2.5)
    assert h.successes(clients, rounds=10) == 1.0
    slow = clients._replace(seconds=lambda client, number: (1.0, 9.0)[client])
    assert h.successes(slow, rounds=10) == pytest.approx(math.log(11) / math.log(21))
    # eight tenths between the two: 1 + 0.8 * 8
    assert h.relative_time(slow, trips=20) == pytest.approx((7.4 + 2.5 / 3) / (2.5 / 3))
    # one of five leaves during its first job and never comes back: the uploads of the other four end each round
    gone = h.Clients(5, lambda *_: 1.0, leaving, 1.0)
    assert h.relative_time(gone, trips=9) == pytest.approx(2 * (1 + 1 / 3) / (9 / 3 / 5))
    # 3 s of work before 4, the rest from 10 on
    assert h.finished(h.Clients(1, lambda *_: 1.0, four_of_ten, 1.0), 0, 1.0, 5.0) == 12.0


def test_blocks_have_the_same_virtual_time_for_all_methods_and_say_what_does_not_fit(files):
    assert len(files.scenes.blocks("small")) == 4 and len(files.scenes.blocks("full")) == 20
    for block in files.scenes.blocks("small"):
        settings = block.settings()
        assert settings["time"] == block.time and settings["eval_time"] * 20 == pytest.approx(block.time)
    with pytest.raises(ValueError, match="clients = 1000: must be at most 300"):
        files.scenes.Block("crowd", "har", "full").settings()
    assert files.scenes.Block("devices", "har", "full").settings()["partition"] == "natural"


def test_a_method_that_runs_nowhere_is_said_with_the_reasons(files):
    refused = [files.kept.Refused("devices", task, "mine", "use jax.numpy") for task in ("logistic", "mlp")]
    with pytest.raises(ValueError, match=r"^mine runs in no block: use jax\.numpy$"):
        files.comparison.require_runs(files.kept.Results([], [], refused), ["mine"])


# --- the command -------------------------------------------------------------------------------------

MINE = """
import optax
from fedjax_async import register, server
from fedjax_async.types import Traced

SEARCH = {"limit": (0.5, 2)}


@register("method", "mine")
def mine(*, limit: Traced = 4.0, server_lr: Traced = 0.5):
    \"\"\"Half a step, shortened by staleness.\"\"\"
    return server.rule(server.scale_by_staleness(lambda tau: limit / (limit + tau)), optimizer=optax.sgd(server_lr))
"""


# As on an accelerator: the process trains itself, so that none beside it imports JAX.
ALONE = f"""
import runpy, sys
sys.path[0] = {str(SCRIPT.parent)!r}
import parts
parts.usual_processes = lambda: 0
for line in sys.argv[1:]:
    sys.argv = ["comparison", "--scale", "smoke", *line.split()]
    runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""


@pytest.mark.usefixtures("nothing_stays_registered")
@pytest.mark.parametrize(("content", "why"), [
    (MINE, r"comparison\.py: known = .* results of the scale smoke"),
    (MINE.replace('{"limit"', '{"limmit"'), "'limmit': must be an option of mine with a default .*: limit, server_lr"),
    (MINE.replace("(0.5, 2)", "2.5"), r"SEARCH\['limit'\] = 2.5: must be two factors of its default"),
    (MINE.replace("(0.5, 2)", "(2, 0.5)"), r"SEARCH\['limit'\] = .* with 0 < low < high"),
    ("x = 1", "it registers nothing"),
])  # fmt: skip
def test_wrong_files_of_a_method_are_said_in_a_line(files, tmp_path, monkeypatch, content, why):
    (tmp_path / "mine.py").write_text(content)
    given = ["--scale", "smoke", "--add", str(tmp_path / "mine.py"), "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["comparison", *given])
    with pytest.raises(SystemExit, match=why) as refused:
        files.comparison.main()
    assert "\n" not in str(refused.value)


def parts_in(folder: Path) -> dict[str, tuple[bytes, int]]:
    """File -> its content and when it was written."""
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.glob("parts/*/*.csv")}


def children(pid: int) -> list[int]:
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.book
@pytest.mark.usefixtures("commands_compile_as_here")
def test_a_killed_comparison_continues_and_another_method_gets_its_row_alone(tmp_path):
    out = tmp_path / "out"
    process = forked.start([str(SCRIPT), "--scale", "smoke", "--processes", "1", "--out", str(out)], tmp_path)
    first = out / "parts" / "devices-logistic" / "fedasync_refused.csv"
    while process.exitcode is None and not first.is_file():
        time.sleep(0.05)
    workers = children(process.pid)
    process.kill()
    process.join()
    until = time.monotonic() + 60
    while any(Path(f"/proc/{pid}/status").exists() for pid in workers) and time.monotonic() < until:
        time.sleep(0.05)
    assert workers and not any(Path(f"/proc/{pid}/status").exists() for pid in workers), "workers end with it"
    before = parts_in(out)
    assert first.name in before and "fedbuff_refused.csv" not in before

    (tmp_path / "alone.py").write_text(ALONE)
    (tmp_path / "mine.py").write_text(MINE)
    lines = ["--out out", "--methods fedbuff --out again", "--add mine.py --known out --out added"]
    done = forked.python([str(tmp_path / "alone.py"), *lines], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    after = parts_in(out)
    assert all(after[name] == each for name, each in before.items() if name.startswith("fedasync"))
    assert {name.partition("_")[0] for name in after} == {"fedasync", "fedbuff"}
    rows = (out / "comparison.csv").read_text().splitlines()
    assert len(rows) == 3 and "hardware" in rows[0]

    again = parts_in(tmp_path / "again")
    assert again and all(again[name][0] == after[name][0] for name in again), "byte for byte"
    of_others, own = done.stdout.rsplit("What was added", 1)
    assert "of 3 by mean rank" in own and own.count("\n| devices ") == 1 and "fedbuff" not in own
    assert "\n| mine " in of_others.rsplit("Mean ranks", 1)[1], "its rank is among the others'"
    assert {name.partition("_")[0] for name in parts_in(tmp_path / "added")} == {"mine"}, "others are not run again"
    committed, added = ((folder / "smoke_runs.csv").read_text() for folder in (out, tmp_path / "added"))
    assert added.startswith(committed) and ",mine,1," in added
    assert "mine:limit=4" in (tmp_path / "added" / "smoke_tuning.csv").read_text(), "its own range: 0.5 to 2 times 4"


def test_a_folder_of_another_comparison_is_refused(files, tmp_path):
    parts = files.parts
    parts.begin(tmp_path, parts.definition("smoke"))
    parts.begin(tmp_path, parts.definition("smoke"))
    with pytest.raises(ValueError, match="must be empty or hold the same comparison"):
        parts.begin(tmp_path, parts.definition("small"))


@pytest.mark.parametrize(("options", "why"), [
    (["--methods", "dpsgd"], "must be methods with a server, not 'dpsgd'"),
    (["--add", "nothing.py"], "must be a Python file, not 'nothing.py'"),
    (["--processes", "0"], "must be a whole number >= 1, not 0"),
    (["--known", "nowhere"], "must be given with --add or --new"),
    (["--keep", "--methods", "fedavg"], "must be given without --add and --methods"),
    (["--new", "--methods", "fedavg"], "must be given without --add and --methods, and these without each other"),
])  # fmt: skip
def test_wrong_options_are_refused(files, monkeypatch, capsys, options, why):
    monkeypatch.setattr(sys, "argv", ["comparison", *options])
    with pytest.raises(SystemExit):
        files.comparison.options()
    assert why in capsys.readouterr().err


def test_the_page_to_explore_has_a_curve_of_every_method(files, tmp_path):
    shown = [(name, seed) for name in ("asgd", "fedbuff") for seed in (0, 1)]
    runs = [kept_run(files, *of, [0.1, 0.5]) for of in shown]
    runs += [kept_run(files, *of, [0.0, -1.0], task="logistic") for of in shown]
    content = files.report.content(files.kept.Results(runs, [], []), "four")
    assert list(content["curves"]["figures"]) == ["devices, mlp", "devices, logistic"]
    figure = content["curves"]["figures"]["devices, logistic"]["time"]
    assert "logarithm" in figure["layout"]["yaxis"]["title"]["text"]
    assert {trace["name"] for trace in figure["data"] if trace["meta"]["part"] == "mean"} == {"asgd", "fedbuff"}
    files.report.write(files.kept.Results(runs, [], []), tmp_path / "page.html", "four")
    assert b"devices, logistic" in (tmp_path / "page.html").read_bytes()
