"""The engine equals the oracle in worlds drawn from the registries: other ones every day.

A failure has a line that draws its world again. ``python -m tests.draws`` counts the pairs of values of a week.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys

import pytest

from tests.draws import EIGHT, PROGRAMS, kept, worlds_of
from tests.judge import judge
from tests.worlds import ALIKE, AXES, kind

DAY = int(os.environ.get("WORLDS") or datetime.datetime.now(datetime.UTC).toordinal())


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A folder of this run of the tests, the same in all processes."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.mark.parametrize("number", range(PROGRAMS - EIGHT))
def test_the_engine_equals_the_oracle(number, folder, tmp_path, record_property):
    record_property("worlds", json.dumps([judge(DAY, number, kept(DAY, folder)[number], tmp_path)]))


def test_the_engine_on_eight_devices_equals_the_oracle(folder, record_property):
    kept(DAY, folder)
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8".replace("level=1", "level=0")
    done = subprocess.run(
        [sys.executable, "-m", "tests.judge", str(DAY), str(folder)],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    record_property("worlds", done.stdout.splitlines()[-1])


def test_most_worlds_are_admitted(folder):
    """A value that is refused in every world, such as a name that reads a file, leaves programs of one world each."""
    found = [(len(drawn.worlds), worlds_of(drawn.worlds[0])) for drawn in kept(DAY, folder)]
    assert sum(have for have, _ in found) >= 0.75 * sum(most for _, most in found), found


def test_a_value_is_of_one_kind_and_has_its_name():
    for axis, alike in ALIKE.items():
        names = " ".join(alike).split()
        assert len(names) == len(set(names))
        values = {str(v) for table in AXES.values() for part in table for v in part.get(axis, [])}
        known = {value.partition(":")[0].partition("=")[0] for value in values}
        assert {*names} <= known
        assert len({kind(axis, value) for value in values}) < len(values)
