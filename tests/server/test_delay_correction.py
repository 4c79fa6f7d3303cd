"""Delay-corrected rules: chains, overflow, the switch of OrthoDyn in a run, and choices.

``test_rules.py`` has their formulas, ``tests/geometry/test_corrections.py`` those of the corrections.
"""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest

from fedjax_async import geometry
from fedjax_async.server import SERVERS, clip_by_norm, dc_asgd, delay_corrected, orthodyn, rule
from tests.refusals import refusals
from tests.server.made_up import D, closing, random_uploads, run, start_params
from tests.server.textbook import Upload


def clipped_first(*, limit):
    return rule(clip_by_norm(limit), delay_corrected(geometry.dc_asgd(strength=0.2)), optimizer=optax.sgd(1.0))


@pytest.mark.float64
def test_a_clipped_delta_may_be_corrected_too():
    uploads = closing(random_uploads(4, 8, rejected=0.0))
    short = [u._replace(delta=u.delta * min(1.0, 2.0 / np.linalg.norm(u.delta))) for u in uploads]
    want = run(dc_asgd, start_params(), short, strength=0.2)[1]
    np.testing.assert_allclose(run(clipped_first, start_params(), uploads, limit=2.0)[1], want, rtol=1e-10)


@pytest.mark.parametrize(("name", "options"), [("dc_asgd", {}), ("dc_asgd_a", {"clip": 5.0})])
def test_a_delta_whose_square_overflows_is_rejected(name, options):
    good = closing(random_uploads(5, 6, rejected=0.0))
    huge = Upload(np.full(D, 1e30), good[0].start, 0, 4.0, True)
    before = run(SERVERS[name], start_params(), good, **options)
    after = run(SERVERS[name], start_params(), [*good, huge], **options)
    jax.tree.map(np.testing.assert_array_equal, after[0], before[0])
    np.testing.assert_array_equal(after[2], [*before[2], 0.0])
    assert np.isfinite(after[1]).all()


test_choices_are_checked = refusals(
    ({"switch": "steps"}, "^switch = 'steps': unknown"),
    ({"phases": "orthograd+orthopoz"}, "^phases = 'orthopoz': unknown; did you mean 'orthopos'"),
    ({"phases": "orthograd"}, r"^phases = 'orthograd': must be two or three names joined by \+"),
    ({"second_fraction": 0.2}, "^second_fraction = 0.2: must be left out: it needs three phases"),
    ({"per": "layers"}, "^per = 'layers': unknown; did you mean 'layer'"),
    by=lambda options: orthodyn(**options),
)
