import numpy as np
import pytest

from fedjax_async.clock import Limits, Until, load_schedule, load_schedule_csv, plan, save_schedule, save_schedule_csv
from fedjax_async.peers import load_peer_schedule, plan_peers, save_peer_schedule
from tests.clock.textbook import same

WAYS = [(save_schedule, load_schedule, "trace.npz"), (save_schedule_csv, load_schedule_csv, "trace.csv")]


def some(updates=57, seed=0):
    timing = "cohort:size=3,over_selection=2"
    return plan(timing, "lognormal", num_clients=9, local_steps=4, until=Until(updates=updates), seed=seed)


def columns_of(path):
    with np.load(path, allow_pickle=False) as archive:
        return dict(archive)


@pytest.mark.parametrize(("save", "load", "name"), WAYS)
def test_a_trace_comes_back_exactly(tmp_path, save, load, name):
    faults = "drop+duplicate:probability=0.5+corrupt:probability=0.5"
    for options in ({}, {"faults": faults, "limits": Limits(timeout=80)}):
        schedule = plan("buffer:size=4", "rpi", num_clients=9, local_steps=4, until=Until(updates=30), **options)
        for one in (schedule, some()):
            save(tmp_path / name, one)
            same(load(tmp_path / name), one)
    assert {0, 1} == set(schedule.corrupt) and len(set(schedule.outcome)) > 2
    assert isinstance(load(tmp_path / name).num_clients, int)


@pytest.mark.parametrize(("save", "load", "name"), WAYS)
def test_equal_schedules_are_equal_files_and_nothing_else_is_left(tmp_path, save, load, name):
    save(tmp_path / name, some())
    first = (tmp_path / name).read_bytes()
    save(tmp_path / name, some())
    assert (tmp_path / name).read_bytes() == first
    assert [p.name for p in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(("save", "load", "name"), WAYS)
def test_a_truncated_file_is_a_clear_error(tmp_path, save, load, name):
    path = tmp_path / name
    save(path, some())
    whole = path.read_bytes()
    for share in (0.0, 0.1, 0.5, 0.9):
        path.write_bytes(whole[: int(len(whole) * share)])
        with pytest.raises(ValueError) as error:
            load(path)
        assert name in str(error.value)
        assert "\n" not in str(error.value)


def test_foreign_files_are_refused(tmp_path):
    path = tmp_path / "trace.npz"
    np.savez(path, weights=np.ones(3))
    with pytest.raises(ValueError, match="not a file of the format"):
        load_schedule(path)
    np.save(tmp_path / "array.npy", np.ones(3))
    with pytest.raises(ValueError, match="not a schedule"):
        load_schedule(tmp_path / "array.npy")
    (tmp_path / "text.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="not a schedule"):
        load_schedule_csv(tmp_path / "text.csv")
    for load in (load_schedule, load_schedule_csv):
        with pytest.raises(ValueError, match="no such file"):
            load(tmp_path / "nowhere")


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
    np.savez(path, **(columns_of(path) | change))
    with pytest.raises(ValueError, match=message):
        load_schedule(path)


def test_a_table_that_a_spreadsheet_saved_is_read(tmp_path):
    path = tmp_path / "trace.csv"
    save_schedule_csv(path, some())
    text = path.read_text()
    for changed in ("\ufeff" + text.replace("\n", "\r\n"), text.replace(",", ", ")):
        path.write_text(changed, newline="")
        same(load_schedule_csv(path), some())
    path.write_text(text.replace(",", ";"))
    with pytest.raises(ValueError, match="Error: separated by semicolons, but must be by commas"):
        load_schedule_csv(path)


def test_a_table_from_before_the_outcomes_names_what_is_missing(tmp_path):
    path = tmp_path / "trace.csv"
    save_schedule_csv(path, some())
    rows = [line.split(",") for line in path.read_text().splitlines()]
    place = rows[0].index("outcome")
    path.write_text("\n".join(",".join(row[:place] + row[place + 1 :]) for row in rows) + "\n")
    with pytest.raises(ValueError, match="no column 'outcome'"):
        load_schedule_csv(path)


def test_plans_of_peers_come_back_and_damaged_ones_are_refused(tmp_path):
    options = {"num_clients": 3, "local_steps": 2, "until": Until(updates=9), "topology": "ring"}
    made, path = plan_peers("push_sum", "lognormal:mean=5", **options), tmp_path / "plan.npz"
    save_peer_schedule(path, made)
    same(load_peer_schedule(path), made)
    bounds = made.inbox_bounds.copy()
    bounds[1] = bounds[-1] + 1
    far = np.full_like(made.mixed_by, len(made.client))
    wrong = {"inbox_bounds": bounds, "mixed_by": far, "outcome": made.outcome + np.int8(6), "num_clients": np.ones(3)}
    more = [("fragments", np.array("two")), ("client", np.array(3))]
    for name, column in [*wrong.items(), *more]:
        save_peer_schedule(path, made._replace(**{name: column}))
        with pytest.raises(ValueError, match=r"plan\.npz: .*the file is damaged"):
            load_peer_schedule(path)
