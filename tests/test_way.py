"""The way of a run from ``simulate`` to the first local step: abilities that it does not use cost it nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "experiments" / "benchmarks"
MOST_FILES, MOST_FUNCTIONS = 74, 482  # reached when this was written; lower them with the way
# files for what the run of ``outcomes_way`` lacks
ABSENT = """
clock/checking clock/csv_tables clock/network clock/timing
config/adaptive config/budget config/cautions config/contracts config/earlier config/measures config/misplaced
config/objects config/policy_steps config/protection config/sweeping config/watching config/words
engine/checkpoint engine/flat engine/measures engine/probes engine/probing engine/streaming engine/unsent
models/modules models/nnx models/torch_modules
results/begun results/beside results/callbacks results/claim results/running results/streams
base/disk base/fingerprints base/notices compress/payload local/sharpness server/privacy
"""
SCRIPT = """
import json
import outcomes_way as way
way.import_all()
found = set()
with way.watched(lambda frame: found.add(frame.f_code)):
    way.simulate(**way.SETTINGS)
files = sorted({code.co_filename.removeprefix(way.ROOT).removesuffix(".py") for code in found})
print(json.dumps({"files": files, "functions": way.counted(found)["functions"]}))
"""


@pytest.mark.usefixtures("commands_compile_as_here")
def test_abilities_that_a_run_does_not_use_are_not_on_its_way():
    path = os.pathsep.join(map(str, (BENCHMARKS, ROOT)))
    env = os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}  # on an accelerator, states are flat
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    way = json.loads(done.stdout)
    assert not {*ABSENT.split()} & {*way["files"]}
    assert len(way["files"]) <= MOST_FILES and way["functions"] <= MOST_FUNCTIONS
    missing = [name for name in ABSENT.split() if not (ROOT / "fedjax_async" / f"{name}.py").is_file()]
    assert not missing, f"no such files: {missing}"
