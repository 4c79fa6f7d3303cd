"""Runs of different worlds on one axis say so; faults and early ends are named after a run and in the report."""

from __future__ import annotations

from fedjax_async.results import accuracy_curve
from fedjax_async.results.worlds import differences, end_text, faults_text, warn_of_differences
from fedjax_async.types import Stopped
from tests.results.made_up import make_run

RUN = make_run()


def in_world(**settings):
    return [RUN._replace(settings=RUN.settings | settings)]


def test_curves_of_different_worlds_say_so_in_the_figure_and_on_standard_error(capsys):
    same = {"a": in_world(clients=5, lr=0.1), "b": in_world(clients=5, lr=0.2)}
    other = {"a": in_world(clients=5, delay="rpi"), "b": in_world(clients=6, delay="rpi")}
    warn_of_differences(same)
    assert differences(same) == capsys.readouterr().err == accuracy_curve(same).axes[0].get_title(loc="left") == ""
    warn_of_differences(other)
    assert differences(other) == "different worlds: clients (5, 6)"
    assert capsys.readouterr().err.startswith("warning: different worlds: clients (5, 6); curves")
    assert accuracy_curve(other).axes[0].get_title(loc="left") == "different worlds: clients (5, 6)"


def test_faults_and_early_ends_in_words():
    counted = {"lost": 3, "crashed": 1, "interrupted": 1, "dropped_stale": 2, "duplicates": 0}
    assert faults_text(counted) == "faults: 3 jobs lost (1 crashed, 1 interrupted), 2 dropped as stale"
    assert faults_text({}) == "" == end_text(RUN)
    early = RUN._replace(counters={"ended_early": "ended after 3 of 9 updates because no client could train"})
    assert end_text(early).startswith("ended after 3 of 9 updates because")
    stopped = RUN._replace(stopped=Stopped("stop_at", "accuracy 0.7 reached", 2))
    assert end_text(stopped) == "ended before its budget: stopped by stop_at at evaluation 2: accuracy 0.7 reached"


def test_long_settings_that_differ_at_their_end_are_different_worlds():
    delays = [f"lognormal:mean=60,sigma=0.3,heterogeneity={spread}" for spread in (0.5, 1)]
    runs = {each: [run._replace(settings={"delay": each})] for each, run in zip(delays, (make_run(), make_run()))}
    assert differences(runs) == "different worlds: delay (…a=0.3,heterogeneity=0.5, …gma=0.3,heterogeneity=1)"
    alike = [
        make_run()._replace(settings={"delay": text, "time": time}) for text, time in (("a:b=1", 9), ("a:b=1.0", 9.0))
    ]
    assert differences({"both": alike}) == ""
