"""Engine = oracle: every rule under every timing policy and three delay models, in float64."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from fedjax_async.clock import TIMINGS
from fedjax_async.engine import run_reference, run_waves
from fedjax_async.server import SERVERS
from tests.engine.problem import case, close

# one or two specs a policy; the length of windows and rounds fits delays of mean 1
POLICIES = {
    "every": ["every", "every:concurrency=3"],
    "buffer": ["buffer:size=3", "buffer:size=2,concurrency=4,sampling=round_robin"],
    "window": ["window:length=0.7"],
    "cohort": ["cohort:size=4", "cohort:size=3,over_selection=1,deadline=2"],
    "participation": ["participation:length=1"],
}
DELAYS = ["constant:mean=1", "lognormal:mean=1,heterogeneity=0.5", "exponential:mean=1"]


def test_policies_are_all_there():
    assert set(POLICIES) == set(TIMINGS)


@pytest.mark.parametrize("delay", DELAYS)
@pytest.mark.parametrize("timing", [spec for specs in POLICIES.values() for spec in specs])
@pytest.mark.parametrize("rule", SERVERS)
def test_engine_equals_oracle(rule, timing, delay):
    with jax.enable_x64(True):
        given = case(rule, timing, delay)
        want = run_reference(*given)
        for width, batching in ((1, "vmap"), (4, "vmap"), (None, "loop")):
            have = run_waves(*given, max_width=width, batching=batching)
            close(have.params, want.params, 1e-9)
            assert have.params["hidden"]["kernel"].dtype == np.float64
            for name, values in want.scores.items():
                np.testing.assert_allclose(have.scores[name], values, rtol=1e-9, atol=1e-12)
            for name, values in want.records.items():
                np.testing.assert_allclose(have.records[name], values, rtol=1e-9, atol=1e-12, err_msg=name)
    before, after = (np.asarray(p["output"]["kernel"]) for p in (given.params, want.params))
    moved = np.abs(after - before).max()
    assert moved > 1e-4, "the run must have trained, or the comparison shows nothing"


def test_proximal_client_equals_oracle():
    with jax.enable_x64(True):
        given = case("fedasync", proximal=0.5)
        close(run_waves(*given).params, run_reference(*given).params, 1e-9)
        plain = case("fedasync")
        gap = np.abs(run_waves(*given).params["output"]["kernel"] - run_waves(*plain).params["output"]["kernel"])
        assert gap.max() > 1e-4
