"""Runs with noise and attackers: the same for every way of execution; refusals of secure aggregation and others."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from fedjax_async import data, simulate
from fedjax_async.base.notices import RunWarning
from fedjax_async.cli.runs import attackers_text
from fedjax_async.config import Settings, prepare
from fedjax_async.config.problem import data_of
from fedjax_async.results.comparisons import comparison

RNG = np.random.default_rng(0)
LABELS = np.arange(80, dtype=np.int32) % 3
POINTS = (RNG.normal(size=(80, 5)) + 2 * np.eye(3, 5)[LABELS]).astype(np.float32)
BLOBS = data.Dataset("blobs", POINTS[:60], LABELS[:60], POINTS[60:], LABELS[60:])
SMALL = {
    **{"dataset": BLOBS, "model": "logistic", "clients": 5, "steps": 3, "batch_size": 4, "partition": "iid"},
    **{"method": "fedbuff@buffer:size=2", "delay": "exponential", "updates": 16, "eval_updates": 8},
}
ALL = {"privacy": "dp:clip=0.3,noise=0.2,quantile=0.5+dp_sgd:clip=0.5,noise=0.3", "attack": "alie:clients=1+3"}
COLUMNS = ("clip", "clipped", "malicious", "sent_norm", "weight")


@pytest.fixture(scope="module")
def protected():
    return simulate(**SMALL, **ALL)


def test_the_oracle_draws_the_same_noise(protected):
    """``test_worlds.py`` draws privacy and attacks, but not both kinds of privacy together or an adaptive clip."""
    oracle = simulate(**SMALL, **ALL, engine="reference")
    for a, b in zip(jax.tree.leaves(oracle.params), jax.tree.leaves(protected.params), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    for name in COLUMNS:
        np.testing.assert_allclose(oracle.updates[name], protected.updates[name], rtol=1e-5, err_msg=name)
    assert len(set(protected.updates["clip"])) == 8


def test_tables_and_lines_count_the_attackers(protected):
    malicious = protected.updates["malicious"]
    assert 0 < malicious.sum() < 16 and set(protected.updates["client"][malicious]) == {1, 3}
    assert attackers_text(protected) == [f"attackers: 2 of 5 clients; {malicious.sum()} of 16 uploads malicious"]
    row, _ = comparison({"fedbuff": [protected], "plain": [protected._replace(counters={})]})
    assert row["attackers"].mean == 2 and row["malicious"].mean == malicious.sum()


def test_attackers_train_on_flipped_labels_and_others_do_not():
    given = {**SMALL, "updates": 4}
    one, plain = (data_of(Settings(**given, attack=attack)) for attack in ("label_flip:share=0.4", None))
    assert one is data_of(Settings(**given, attack="label_flip:share=0.4")), "equal settings, the same object"
    assert one.malicious.sum() == 2 and plain.malicious is None
    for client in range(5):
        rows = one.order[one.offset[client] : one.offset[client] + one.size[client]]
        before, after = plain.y[rows], one.y[rows]
        np.testing.assert_array_equal(after, 2 - before if one.malicious[client] else before)
    np.testing.assert_array_equal(one.test_y, plain.test_y)


WRONG = [
    ({"privacy": "dpp"}, "privacy = 'dpp': unknown; did you mean 'dp'"),
    ({"privacy": "dp:clip=-1"}, "privacy = 'dp:clip=-1': clip = -1: must be a finite number > 0"),
    ({"privacy": "dp+dp:noise=2"}, r"privacy = 'dp\+dp:noise=2': parts for uploads = 2: must be at most one of a kind"),
    ({"privacy": 3}, "privacy = 3: must be a text such as"), ({"attack": "sign"}, "attack = 'sign': unknown"),
    ({"attack": "sign_flip:share=2"}, "attack = 'sign_flip:share=2': share = 2: must be between 0 and 1"),
    ({"attack": "sign_flip:share=0.05"},
     "attack = 'sign_flip:share=0.05': share = 0.05: must be 0, or above 0.1: it rounds to no attacker among 5 cl"),
    ({"attack": "sign_flip:clients=7"}, "attack = '.*=7': clients = 7: must be a whole number from 0 to 4"),
    ({"attack": "label_flip", "dataset": "quadratic", "model": "linear", "partition": "natural"},
     "attack = 'label_flip'"),
    ({"privacy": "dp_sgd", "method": "scaffold"}, "privacy = 'dp_sgd': must be without dp_sgd: the local training of"),
    ({"privacy": "dp_sgd", "optimizer": "sam"}, "optimizer = 'one with 2 gradients a step'"),
]  # fmt: skip
SUMS = "the server sees sums only"
SECURE = [
    ({"method": "fedmedian"}, f"method = 'fedmedian': must be one that uses only the weighted sum.*{SUMS}"),
    ({"method": "ca2fl"}, "method = 'ca2fl'"),
    ({"method": "fedbuff+correction"}, "method = 'fedbuff.correction'"),
    ({"method": "fedbuff:clip=1"}, "method = 'fedbuff:clip=1'"),
    ({"norm_limit": 2.0}, f"norm_limit = 2.0: must be left out .*{SUMS}"),
    ({"timing": "every"}, "uploads of the smallest server step = 1: must be at least 2"),
    ({"privacy": "secure:size=4"}, "uploads of the smallest server step = 3: must be at least 4"),
    ({"privacy": "secure:size=2+dp:quantile=0.5"}, "staleness with secure and an adaptive clip = "),
    # corrupt uploads are in no sum: all five clients come in each window, and in the first one is sound
    ({"timing": "window:length=2", "delay": "constant", "faults": "corrupt:probability=0.7"},
     "uploads of the smallest server step = 1: must be at least 2"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "says"), WRONG)
def test_wrong_values_are_refused(wrong, says):
    with pytest.raises(ValueError, match=f"^{says}"):
        prepare(Settings(**{**SMALL, **wrong}))


@pytest.mark.parametrize(("wrong", "says"), SECURE)
def test_secure_aggregation_refuses_what_needs_single_uploads(wrong, says):
    usual = SMALL | {"method": "fedbuff", "timing": "buffer:size=3", "privacy": "secure:size=2"}
    with pytest.raises(ValueError, match=f"^{says}"):
        prepare(Settings(**usual | wrong))


def test_secure_aggregation_takes_sums_and_no_probes():
    secure = SMALL | {"method": "fedavg@cohort:size=3", "privacy": "secure:size=3+dp:quantile=0.5", "updates": 9}
    assert prepare(Settings(**secure)).total == 9
    with pytest.raises(ValueError, match=r"probes = .*: must be left out .*sums only"):
        prepare(Settings(**secure), probes={"norm": lambda state, memory, arrival, parts: {"weight": arrival.weight}})


def test_sums_of_fewer_uploads_because_some_were_rejected_are_said():
    given = SMALL | {"privacy": "secure:size=2", "attack": "scaled:factor=3e38,clients=1", "engine": "reference"}
    with pytest.warns(RunWarning, match=r"the server saw \d+ sums of fewer than 2 uploads, the smallest of 1"):
        run = simulate(**given)
    assert run.counters["rejected"] > 0


def test_more_noise_costs_accuracy():
    """Noise and clip are traced, so the runs share programs."""
    spec = "dp:clip=1,noise={},quantile=0.5+dp_sgd:clip=5,noise=0.01"
    given = SMALL | {"updates": 200, "lr": 0.3, "attack": ALL["attack"]}
    loud, quiet = (simulate(**given, privacy=spec.format(z)).evaluations["accuracy"][-1] for z in (20, 0.05))
    assert quiet - loud > 0.2
