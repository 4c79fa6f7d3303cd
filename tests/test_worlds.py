"""The engine equals the oracle in worlds drawn from the registries: other ones every day.

A failure has a line that draws its world again. ``python -m tests.worlds`` counts the pairs of values of a week.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys

import pytest

from tests.judge import judge
from tests.worlds import EIGHT, PROGRAMS, drafts

DAY = int(os.environ.get("WORLDS") or datetime.datetime.now(datetime.UTC).toordinal())


@pytest.mark.parametrize("number", range(PROGRAMS))
def test_the_engine_equals_the_oracle(number, tmp_path, record_property):
    if drafts(DAY)[number][0]["devices"] is None:
        found = [judge(DAY, number, tmp_path)]
    elif number == PROGRAMS - EIGHT:  # one process for all of them
        flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8".replace("level=1", "level=0")
        numbers = map(str, range(number, PROGRAMS))
        done = subprocess.run(
            [sys.executable, "-m", "tests.judge", str(DAY), *numbers],
            env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            check=False,
            timeout=800,
        )
        assert done.returncode == 0, done.stderr[-6000:]
        found = json.loads(done.stdout.splitlines()[-1])
    else:
        return
    record_property("worlds", json.dumps(found))
