"""Schedules made by hand, checked and filled in; schedules in files."""

import functools
from time import perf_counter

import numpy as np
import pytest

from fedjax_async.clock import Limits, Outcome, Until, check_schedule, concurrency, fault_counts, make_schedule, plan
from fedjax_async.clock.trace import load_schedule, load_schedule_csv, save_schedule, save_schedule_csv
from fedjax_async.clock.waves import wave_statistics
from fedjax_async.peers import load_peer_schedule, plan_peers, save_peer_schedule
from fedjax_async.types import Schedule
from tests.clock.textbook import make, same
from tests.refusals import refusals
from tests.told import refusal

OPTIONAL = ("outcome", "freed_time", "corrupt", "copies")
DERIVED = ("number", "version", "step", *OPTIONAL)
# Client 0 has job 0 (arrival 0, at 1), job 2, whose upload never comes, and job 3; client 1 has job 1.
COLUMNS = {
    "num_clients": 3, "client": [0, 1, 0, 0], "local_steps": 5, "dispatch_time": [0, 0, 1, 4],
    "upload_time": [1, 2, np.inf, 5], "dispatched_after": [0, 0, 1, 2], "job": [0, 1, 3], "time": [1, 2, 5],
    "closes": [True, False, True],
}  # fmt: skip


def bare(schedule):
    """The schedule without its optional columns, as if made by hand."""
    return Schedule(**{name: getattr(schedule, name) for name in Schedule._fields if name not in OPTIONAL})


def test_what_is_left_out_is_derived(tmp_path):
    s = make_schedule(**COLUMNS)
    derived = {
        "number": [0, 0, 1, 2], "version": [0, 0, 1, 1], "step": [0, 1, 1], "local_steps": [5] * 4,
        "outcome": [Outcome.APPLIED, Outcome.APPLIED, Outcome.CALLED_OFF, Outcome.APPLIED],
        "freed_time": [1, 2, 4, 5], "corrupt": [0] * 4, "copies": [0] * 4,
    }  # fmt: skip
    assert {name: getattr(s, name).tolist() for name in derived} == derived
    planned = plan("every", "constant", num_clients=2, local_steps=1, until=Until(updates=3))
    assert [np.asarray(c).dtype for c in s] == [np.asarray(c).dtype for c in planned]
    same(check_schedule(bare(s)), s)
    assert concurrency(bare(s))[1].tolist() == [2, 2, 1, 1, 0]
    for save, load, name in WAYS:
        save(tmp_path / name, bare(s))
        same(load(tmp_path / name), s)
    same(make_schedule(**COLUMNS, outcome=s.outcome.tolist(), corrupt=[0, 0, 0, 0], number=s.number), s)


@pytest.mark.parametrize("timing", ["every:concurrency=3", "buffer:size=3", "window:length=1", "cohort:size=3"])
def test_a_reliable_plan_is_made_again_from_its_columns_and_has_its_statistics_without_the_others(timing):
    s = make(timing)
    fields = {name: value for name, value in s._asdict().items() if name not in (*DERIVED, "exhausted")}
    same(make_schedule(**fields), s)
    assert check_schedule(s) == s  # the very same arrays
    np.testing.assert_array_equal(concurrency(bare(s)), concurrency(s))
    assert wave_statistics(bare(s)) == wave_statistics(s) and fault_counts(bare(s)) == fault_counts(s)


test_contradictions_are_refused = refusals(
    ({"client": [0, 1, 0, 3]}, r"schedule\.client\[3\] = 3: must be from 0 to 2"),
    ({"client": [0, 1, 0, -1]}, r"schedule\.client\[3\] = -1"),
    ({"client": [0, 1.5, 0, 0]}, r"schedule\.client\[1\] = 1\.5: must be of type int32"),
    ({"client": [0, 2**40, 0, 0]}, r"schedule\.client\[1\] = 1099511627776"),
    ({"client": ["a", "b", "c", "d"]}, r"schedule\.client: must be a sequence of numbers"),
    ({"num_clients": 0}, r"num_clients = 0|schedule\.client\[0\]"),
    ({"local_steps": 0}, r"schedule\.local_steps\[0\] = 0"),
    ({"local_steps": [5, 5]}, r"schedule\.local_steps: has length 2, must have one entry per job \(4\)"),
    ({"dispatch_time": [0, 0, 1, 0.5]}, r"schedule\.dispatch_time\[3\] = 0\.5: must be at least the one before"),
    ({"dispatch_time": [0, 0, 1, np.nan]}, r"schedule\.dispatch_time\[3\] = nan: must be a finite number >= 0"),
    ({"upload_time": [1, -1, np.inf, 5]}, r"schedule\.upload_time\[1\] = -1\.0: must be at or after its dispatch"),
    ({"upload_time": [1, 3, np.inf, 5]}, r"schedule\.time\[1\] = 2\.0: must be at or after the upload_time"),
    ({"dispatched_after": [0, 0, 1, 4]}, r"schedule\.dispatched_after\[3\] = 4: must be from 0 to 3"),
    ({"dispatched_after": [0, 0, 2, 1]}, r"schedule\.dispatched_after\[3\] = 1: must be at least"),
    ({"dispatched_after": [0, 0, 1, 1]}, r"schedule\.dispatched_after\[3\] = 1: must be the count of arrivals"),
    ({"dispatched_after": [0, 1, 1, 2]}, r"schedule\.dispatched_after\[1\] = 1: must be the count of arrivals"),
    ({"dispatched_after": [0, 0, 1, 3]}, r"schedule\.job\[2\] = 3: must be a job that was sent before it arrives"),
    ({"job": [0, 1, 4]}, r"schedule\.job\[2\] = 4: must be from 0 to 3"),
    ({"job": [0, 1, 1]}, r"schedule\.job\[1\] = 1: must be among the arrivals once"),
    ({"time": [1, 2, 1.5]}, r"schedule\.time\[2\] = 1\.5: must be at least the one before"),
    ({"time": [1, 2]}, r"schedule\.time: has length 2, must have one entry per arrival"),
    ({"closes": [True]}, r"schedule\.closes: has length 1, must have one entry per arrival \(3\)"),
    ({"number": [0, 0, 1, 1]}, r"schedule\.number\[3\] = 1"),
    ({"version": [0, 0, 0, 1]}, r"schedule\.version\[2\] = 0: must be the count of steps closed before"),
    ({"step": [0, 1, 2]}, r"schedule\.step\[2\] = 2"),
    ({"outcome": [0, 0, 0, 0]}, r"schedule\.outcome\[2\] = 0: must be APPLIED or LATE for arrivals"),
    ({"outcome": [0, 0, 77, 0]}, r"schedule\.outcome\[2\] = 77: must be from 0 to 10"),
    ({"outcome": [0, 0]}, r"schedule\.outcome: has length 2"),
    ({"freed_time": [1, 2, 0.5, 5]}, r"schedule\.freed_time\[2\] = 0\.5"),
    ({"copies": [0, -1, 0, 0]}, r"schedule\.copies\[1\] = -1"),
    ({"corrupt": [0, 2, 0, 0]}, r"schedule\.corrupt\[1\] = 2"),
    # job 2 is sent before arrival 0 of the same client is applied: by count, though at the same moment, and by time
    ({"dispatched_after": [0, 0, 0, 2]}, r"after 0 arrivals: must not be before client 0 is done with its job 0"),
    ({"dispatch_time": [0, 0, 0.5, 4]}, r"dispatch_time\[2\] = 0\.5 .* done with its job 0, arrival 0, at 1\.0"),
    # job 3 is sent before job 2 is freed, or before its upload has come, though it was given up
    ({"freed_time": [1, 2, 4.5, 5]}, r"dispatch_time\[3\] = 4\.0 .* with its job 2 at 4\.5"),
    ({"upload_time": [1, 2, 4.5, 5], "freed_time": [1, 2, 3, 5], "outcome": [0, 0, Outcome.DROPPED_LATE, 0]},
     r"dispatch_time\[3\] = 4\.0 .* with its job 2 at 4\.5"),
    ({"upload_time": [1, 2, 4.5, 5]}, r"with its job 2 at 4\.5"),
    by=lambda change: make_schedule(**(COLUMNS | change)),
)  # fmt: skip


def test_jobs_that_follow_each_other_at_one_moment_do_not_overlap():
    tie = COLUMNS | {"upload_time": [1 + 1e-15, 2, 4 * (1 + 1e-15), 5], "time": [1 + 1e-15, 2, 5]}
    assert make_schedule(**tie).freed_time[2] > 4


def test_a_schedule_without_jobs_is_one():
    empty = dict.fromkeys(("client", "dispatch_time", "upload_time", "dispatched_after", "job", "time", "closes"), ())
    assert len(make_schedule(num_clients=1, local_steps=1, **empty).outcome) == 0


@pytest.mark.slow
def test_a_million_jobs_are_checked_well_within_a_second():
    s = plan("every:concurrency=1000", "exponential", num_clients=10**5, local_steps=1, until=Until(updates=10**6))
    for one in (s, bare(s)):
        begin = perf_counter()
        check_schedule(one)
        assert perf_counter() - begin < 3  # a busy machine; about 0.2 s alone


# --- files --------------------------------------------------------------------------------------

WAYS = [(save_schedule, load_schedule, "trace.npz"), (save_schedule_csv, load_schedule_csv, "trace.csv")]


def some(updates=57, seed=0):
    timing = "cohort:size=3,over_selection=2"
    return plan(timing, "lognormal", num_clients=9, local_steps=4, until=Until(updates=updates), seed=seed)


@pytest.mark.parametrize(("save", "load", "name"), WAYS)
def test_a_trace_comes_back_exactly_and_truncated_files_are_a_clear_error(tmp_path, save, load, name):
    faults = "drop+duplicate:probability=0.5+corrupt:probability=0.5"
    path, written = tmp_path / name, []
    for options in ({}, {"faults": faults, "limits": Limits(timeout=80)}):
        schedule = plan("buffer:size=4", "rpi", num_clients=9, local_steps=4, until=Until(updates=30), **options)
        for one in (schedule, some()):
            save(path, one)
            same(load(path), one)
            written.append(path.read_bytes())
    assert {0, 1} == set(schedule.corrupt) and len(set(schedule.outcome)) > 2
    assert isinstance(load(path).num_clients, int)
    assert written[1] == written[3] and [p.name for p in tmp_path.iterdir()] == [name]
    for share in (0.0, 0.1, 0.5, 0.9):
        path.write_bytes(written[1][: int(len(written[1]) * share)])
        assert name in refusal(load, path)


def test_foreign_files_are_refused(tmp_path):
    np.savez(tmp_path / "trace.npz", weights=np.ones(3))
    np.save(tmp_path / "array.npy", np.ones(3))
    (tmp_path / "text.csv").write_text("a,b\n1,2\n")
    for load, name, says in (
        (load_schedule, "trace.npz", "not a file of the format"), (load_schedule, "array.npy", "not a schedule"),
        (load_schedule_csv, "text.csv", "not a schedule"),
        (load_schedule, "nowhere", "no such file"), (load_schedule_csv, "nowhere", "no such file"),
    ):  # fmt: skip
        assert says in refusal(load, tmp_path / name)


@pytest.mark.parametrize(("change", "message"), [
    ({"format_version": np.array(1)}, "format version 1, but only 2"),
    ({"job": np.zeros(57, np.int64)}, "contradict"), ({"client": np.full(100, 9, np.int32)}, "contradict"),
    ({"step": np.zeros(57, np.int64)}, "contradict"), ({"time": np.zeros(3)}, "column 'time'"),
    ({"closes": np.zeros(57)}, "column 'closes'"), ({"outcome": np.zeros(0, np.int8)}, "column 'outcome'"),
    ({"outcome": np.zeros(100, np.int8)}, "contradict"), ({"outcome": np.full(100, 77, np.int8)}, "contradict"),
    ({"corrupt": np.zeros(100)}, "column 'corrupt'"),
    ({"num_clients": np.array([1, 2])}, "trace.npz: column 'num_clients' must be one whole number"),
    ({"num_clients": np.array("ten")}, "trace.npz: column 'num_clients' must be one whole number"),
    ({"client": np.array(1)}, "trace.npz: column 'client' must be an array"),
])  # fmt: skip
def test_damaged_columns_are_found(tmp_path, change, message):
    path = tmp_path / "trace.npz"
    save_schedule(path, some())
    with np.load(path, allow_pickle=False) as archive:
        np.savez(path, **(dict(archive) | change))
    assert message in refusal(load_schedule, path)


@pytest.mark.parametrize(("save", "load", "name"), WAYS)
def test_a_trace_of_one_job_comes_back(tmp_path, save, load, name):
    when = {"dispatch_time": [0], "upload_time": [1], "dispatched_after": [0], "time": [1]}
    one = make_schedule(num_clients=3, client=[2], local_steps=4, job=[0], closes=True, **when)
    save(tmp_path / name, one)
    same(load(tmp_path / name), one)


def test_a_table_that_a_spreadsheet_saved_is_read(tmp_path):
    path = tmp_path / "trace.csv"
    save_schedule_csv(path, some())
    text = path.read_text()
    for changed in ("\ufeff" + text.replace("\n", "\r\n"), text.replace(",", ", ")):
        path.write_text(changed, newline="")
        same(load_schedule_csv(path), some())
    path.write_text(text.replace(",", ";"))
    assert "Error: separated by semicolons, but must be by commas" in refusal(load_schedule_csv, path)
    rows = [line.split(",") for line in text.splitlines()]  # from before the outcomes
    place = rows[0].index("outcome")
    path.write_text("\n".join(",".join(row[:place] + row[place + 1 :]) for row in rows) + "\n")
    assert "no column 'outcome'" in refusal(load_schedule_csv, path)


def test_plans_of_peers_come_back_and_damaged_ones_are_refused(tmp_path):
    options = {"num_clients": 3, "local_steps": 2, "until": Until(updates=9), "topology": "ring"}
    made, path = plan_peers("push_sum", "lognormal:mean=5", **options), tmp_path / "plan.npz"
    save_peer_schedule(path, made)
    same(load_peer_schedule(path), made)
    bounds = made.inbox_bounds.copy()
    bounds[1] = bounds[-1] + 1
    far = np.full_like(made.mixed_by, len(made.client))
    wrong = {"inbox_bounds": bounds, "mixed_by": far, "outcome": made.outcome + np.int8(6), "num_clients": np.ones(3)}
    wrong |= {"fragments": np.array("two"), "client": np.array(3)}
    for name, column in wrong.items():
        save_peer_schedule(path, made._replace(**{name: column}))
        with pytest.raises(ValueError, match=r"plan\.npz: .*the file is damaged"):
            load_peer_schedule(path)


def test_plans_without_clients_left_say_so_in_files_and_older_files_do_not(tmp_path):
    path, world = tmp_path / "plan.npz", {"num_clients": 3, "local_steps": 2, "until": Until(updates=500)}
    for made, save, load in (
        (functools.partial(plan, "every"), save_schedule, load_schedule),
        (functools.partial(plan_peers, "mean", topology="ring"), save_peer_schedule, load_peer_schedule),
    ):
        for availability, expected in (("leaves:share=1,by=50", True), (None, False)):
            save(path, made(delays="constant:mean=9", availability=availability, **world))
            assert load(path).exhausted is expected
        with np.load(path) as archive:
            columns = {name: archive[name] for name in archive.files if name not in ("exhausted", "unsent_mass")}
        np.savez(path, **columns)
        assert load(path).exhausted is False
