"""Joules and carbon by hand arithmetic; tables of devices; FedScale's traces as tables of the clock."""

import json
import shlex

import numpy as np
import pytest

from fedjax_async import cli, simulate
from fedjax_async.base import notices
from fedjax_async.clock import Faults, JobFaults, Limits, Outcome, Until, plan
from fedjax_async.clock.energy import Devices, bind, boards, energy_until, job_energy
from fedjax_async.clock.fedscale import write_tables
from fedjax_async.results.comparisons import comparison
from fedjax_async.results.metrics import to_target
from tests.clock.textbook import table_of
from tests.refusals import refusals
from tests.told import refusal

ONE = {"num_clients": 1, "local_steps": 1, "until": Until(updates=3)}
TWO = Devices(*map(np.array, ([6.0, 2.0], [1.0, 0.5], [0.01, 0.0], [0.02, 0.03], [360.0, 3600.0])))


def test_jobs_and_runs_by_hand():
    """Both clients train from 0 to 10 s and from 10 to 20 s; 100 bytes down, 50 up."""
    schedule = plan("every", "constant:mean=10", num_clients=2, local_steps=1, until=Until(updates=4))
    joules, grams = job_energy(TWO, schedule, 100, 50)
    of_client = np.array([6 * 10 + 1 + 1, 2 * 10 + 0 + 1.5])
    np.testing.assert_allclose(joules[:4], of_client[schedule.client[:4]])
    np.testing.assert_allclose(grams, joules * np.array([1e-4, 1e-3])[schedule.client])
    moments = np.array([0.0, 5.0, 10.0, 15.0])
    joules, grams = energy_until(TWO, schedule, moments, 100, 50)
    first = np.array([1, 31, 60 + 1 + 1 + 1, 90 + 1 + 2])  # at 10 s the upload arrives, and a second job begins
    second = np.array([0, 10, 20 + 1.5, 30 + 1.5])
    np.testing.assert_allclose(joules, first + second)
    np.testing.assert_allclose(grams, 1e-4 * first + 1e-3 * second)
    whole = energy_until(TWO, schedule, np.array([1e6]), 0, 0)[0]  # idle from then on
    busy = np.bincount(schedule.client, weights=schedule.upload_time - schedule.dispatch_time)
    np.testing.assert_allclose(whole, TWO.training @ busy + TWO.idle @ (1e6 - busy))


def test_failed_jobs_cost_what_their_clients_did_whenever_the_server_notices():
    """Jobs of 100 s: a lost one is trained to the end, a crashed one up to the crash, and neither to its timeout."""
    world = ONE | {"seed": 1, "until": Until(time=2000)}
    one = bind("flat:training=1,up=1", 1, 0)
    lost = plan("every", "constant:mean=100", faults="drop:probability=0.5", limits=Limits(timeout=10.0), **world)
    assert 3 < np.sum(lost.outcome == Outcome.LOST) < len(lost.client) - 3
    sizes = np.arange(len(lost.client))
    np.testing.assert_allclose(job_energy(one, lost, 0, sizes)[0], 100 + sizes)
    assert energy_until(one, lost, np.array([2000.0]), 0, 0)[0] == pytest.approx(2000)  # it never rests
    faults = "crash:probability=0.5,restart=1"
    crashed = plan("every", "constant:mean=100", faults=faults, limits=Limits(timeout=500.0), **world)
    failed = crashed.outcome == Outcome.CRASHED
    worked = np.where(failed, crashed.failure_time - crashed.dispatch_time, 100)
    assert 2 < failed.sum() < len(failed) - 2 and (worked[failed] < 100).all()
    known = crashed.outcome != Outcome.UNDER_WAY
    np.testing.assert_allclose(job_energy(one, crashed, 0, 7)[0][known], (worked + 7 * ~failed)[known])


def test_clients_whose_jobs_are_given_up_work_until_they_are_called_off():
    """Client 1 has jobs of 100 s, which are given up after 5 s and called off at each server step, every 10 s."""
    limits, rows = Limits(timeout=5), table_of([10], [100])
    schedule = plan("fresh:threshold=1", rows, num_clients=2, local_steps=1, until=Until(updates=6), limits=limits)
    joules, _ = energy_until(bind("flat:training=1", 2, 0), schedule, np.array([5.0, 8.0, 60.0]), 0, 0)
    np.testing.assert_allclose(joules, [10, 16, 120])


def test_a_client_that_crashes_before_its_round_ends_works_until_then():
    """The round of 10 s takes one of two uploads; client 1 crashes after a quarter of its 20 s."""
    crash = Faults(lambda clients, numbers: JobFaults(crash_share=np.where(clients == 1, 0.25, np.inf)))
    world = {"num_clients": 2, "local_steps": 1, "until": Until(steps=1), "faults": lambda *_: crash}
    schedule = plan("cohort:size=1,over_selection=1", table_of([10], [20]), **world)
    assert schedule.outcome[:2].tolist() == [Outcome.APPLIED, Outcome.CALLED_OFF]
    joules, _ = energy_until(bind("flat:training=1", 2, 0), schedule, np.array([5.0, 10.0]), 0, 0)
    np.testing.assert_allclose(joules, [10, 15])


def test_a_failure_that_is_not_noticed_by_the_end_costs_as_much_as_in_a_longer_run():
    """With a long timeout, most clients of a run have failed and wait for the server to notice."""
    faults, world = "crash:probability=0.4,restart=1+drop:probability=0.2", ONE | {"num_clients": 9, "seed": 3}
    world |= {"faults": faults, "limits": Limits(timeout=500)}
    short, long = (plan("every", "lognormal:mean=60", **world | {"until": Until(time=t)}) for t in (400, 4000))
    assert (np.isfinite(short.failure_time) & (short.outcome == Outcome.UNDER_WAY)).sum() > 3
    moments, devices = np.linspace(0, 400, 9), bind("flat:training=1,down=0.1", 9, 0)
    each = [energy_until(devices, one, moments, 10, 10)[0] for one in (short, long)]
    np.testing.assert_allclose(*each, rtol=1e-12)


@pytest.mark.parametrize("timing", ["every", "window:length=0.1"])
def test_messages_have_cost_their_energy_when_their_bytes_are_counted(timing):
    """Jobs of 0.1 s: the third ends at 3 * 0.1 > 0.3 in floating point, and belongs to the evaluation at 0.3 s."""
    schedule = plan(timing, "constant:mean=0.1", num_clients=2, local_steps=1, until=Until(time=2))
    none, one, moments = np.zeros(2), np.ones(2), np.arange(20) / 10
    for down, up, first in ((none, one, 0), (one, none, 2)):
        joules, _ = energy_until(Devices(none, none, down, up, none), schedule, moments, 1, 1)
        np.testing.assert_array_equal(joules, first + 2 * np.arange(20))


def test_tables_of_devices(tmp_path):
    file = tmp_path / "watts.csv"
    file.write_text("client,training,carbon,source\n1,7,100,measured\n0,5,50,measured\n")
    devices = bind(f"csv:path={file}", 2, 0)
    assert devices.training.tolist() == [5, 7] and devices.carbon.tolist() == [50, 100] and not devices.idle.any()
    drawn = bind("boards", 10, 1).training
    assert sorted(drawn[:5]) == sorted(drawn[5:]) == [1.2, 2.1, 3.7, 5.1, 6.4]
    assert boards(device="raspberry_pi_4b")(3, 0).idle.tolist() == [2.7] * 3


test_options_out_of_range_are_refused = refusals(
    ("boards:device=laptop", "device = 'laptop': must be one of raspberry_pi_zero"),
    ("flat:idle=-1", "idle = -1: must be a finite number >= 0"),
    by=lambda spec: bind(spec, 3, 0),
)  # fmt: skip


def test_columns_of_runs_and_of_comparisons():
    world = {"model": "logistic", "dataset": "synthetic", "clients": 3, "steps": 1, "updates": 6, "eval_updates": 3}
    run = simulate(method="fedasync", delay="constant:mean=10", energy="flat:training=4,up=0.001,carbon=1800", **world)
    size = int(run.evaluations["bytes_up"][-1]) // 6
    np.testing.assert_allclose(run.updates["energy"], 40 + 0.001 * size)
    np.testing.assert_allclose(run.evaluations["energy"], [0, 120 + 0.003 * size, 240 + 0.006 * size])
    np.testing.assert_allclose(run.evaluations["carbon"], run.evaluations["energy"] / 2000)
    assert to_target(run, 0.0, unit="energy") == 0
    (row,) = comparison({"fedasync": [run]})
    np.testing.assert_allclose(row["energy (kJ)"].mean, run.evaluations["energy"][-1] / 1000)
    np.testing.assert_allclose(row["carbon (g CO2e)"].mean, run.evaluations["carbon"][-1])
    said = refusal(simulate, method="pushcen", energy="flat", **world)
    assert "energy = 'flat': must be left out: pushcen runs without a server" in said


# --- FedScale ---------------------------------------------------------------------------------------

CAPACITY = {"432802": {"computation": 162.0, "communication": 5648.0}, "7": {"computation": 20, "communication": 64.0}}
BEHAVIOUR = {
    "a": {"duration": 9, "inactive": [50, 90], "finish_time": 100, "active": [10, 60], "model": "CPH1801"},
    "b": {"inactive": [40, 300], "finish_time": 200, "active": [0, 150]},
}


def test_traces_of_fedscale_become_tables(tmp_path, capsys):
    files = {name: tmp_path / f"{name}.json" for name in ("capacity", "behaviour")}
    for file, content in zip(files.values(), (CAPACITY, BEHAVIOUR)):
        file.write_text(json.dumps(content))
    command = ["data", "fedscale", "--out", str(tmp_path / "t"), "--batch-size", "10"]
    assert cli.main([*command, *(f"--{name}={file}" for name, file in files.items())]) == 0
    assert (tmp_path / "t" / "delay.csv").read_text() == "client,mean,std,compute\n0,4.86,0,4.86\n1,0.6,0,0.6\n"
    assert (tmp_path / "t" / "network.csv").read_text().splitlines()[2] == "1,8192,8192,0"
    stretches = (tmp_path / "t" / "availability.csv").read_text().split()
    assert stretches[1:] == ["0,10,50", "0,60,90", "0,110,150", "0,160,190", "1,0,40", "1,150,200"]
    flags = dict(zip(*[iter(capsys.readouterr().out.split("use: ")[1].split())] * 2))
    assert "repeat" not in flags["--availability"]
    options = {name.removeprefix("--"): spec for name, spec in flags.items()}
    world = {"num_clients": 2, "local_steps": 5, "until": Until(updates=2), "bytes_down": 4096, "bytes_up": 4096}
    schedule = plan("every", options.pop("delay"), **options, **world)
    np.testing.assert_allclose(np.sort(schedule.upload_time[:2])[0], 5 * 0.6 + 1)  # client 1, online from 0 s


@pytest.mark.parametrize("end", [100, 1234567, 123456.78999])
def test_a_recording_ends_where_the_table_repeats_and_its_flags_can_be_pasted(tmp_path, end):
    """Both are written with as many digits: with fewer in the table, its last interval ended after the recording."""
    file, folder = tmp_path / "behaviour.json", tmp_path / "devices, mine"
    file.write_text(json.dumps({"a": {"finish_time": end, "active": [10], "inactive": [end]}}))
    flag, spec = shlex.split(write_tables(folder, behaviour=file))
    assert flag == "--availability" and spec == f'csv:path="{folder}/availability.csv",repeat={end}'
    assert plan("every", "constant:mean=10", availability=spec, **ONE).dispatch_time[0] == 10


def test_sessions_of_length_zero_are_skipped_and_devices_without_others_left_out(tmp_path):
    """As in FedScale's published record, where a device has equal active and inactive seconds."""
    file = tmp_path / "behaviour.json"
    equal = {"finish_time": 100, "active": [20, 20.5], "inactive": [20, 20.5]}
    some = {"finish_time": 100, "active": [5, 10, 60, 90], "inactive": [5, 50, 60, 100]}
    file.write_text(json.dumps({"never": equal, "a": some, "b": BEHAVIOUR["a"], "cut": equal | {"finish_time": 10}}))
    for clients in (None, 2):
        with pytest.warns(notices.RunWarning, match=r"devices that are never online are left out \(never(, cut)?\)"):
            write_tables(tmp_path / "t", behaviour=file, clients=clients)
        lines = (tmp_path / "t" / "availability.csv").read_text().split()
        assert lines[1:] == ["0,10,50", "0,90,100", "1,10,50", "1,60,90"]
    with pytest.raises(ValueError, match=r"^clients = 3: must be at most 2, the devices online in"):
        write_tables(tmp_path / "t", behaviour=file, clients=3)


NEVER = {name: {"finish_time": 9, "active": [on], "inactive": [off]} for name, on, off in (("a", 9, 12), ("b", 3, 3))}


@pytest.mark.parametrize(("kind", "content", "message"), [
    ("capacity", b"\x80\x04\x95 pickled", "must be a JSON file; `fedjax-async data fedscale --help` tells"),
    ("capacity", [], "'a list': must be devices by name"),
    ("capacity", {"7": {"computation": 0}}, "device 7: computation = 0: must be a finite number > 0"),
    ("capacity", {"7": {"computation": 1}}, "device 7: communication = None: must be"),
    ("behaviour", {"a": {"finish_time": 9, "active": [1], "inactive": []}}, "active = 1: must be 0 times"),
    ("behaviour", {"a": {"finish_time": 9, "active": [5], "inactive": [2]}}, "must be in turn, in increasing order"),
    ("behaviour", NEVER, "2 devices that are never online': must be from active to inactive for some seconds"),
    ("behaviour", {"a": 3}, "device a = 'a int': must be an object"),
])  # fmt: skip
def test_damaged_traces(tmp_path, kind, content, message):
    file = tmp_path / "trace.json"
    file.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    assert message in refusal(write_tables, tmp_path / "t", **{kind: file}) and not (tmp_path / "t").exists()
