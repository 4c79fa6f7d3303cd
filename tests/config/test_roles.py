"""The roles of swept settings: every setting has a usual role, and only valid roles are accepted."""

from __future__ import annotations

import pytest

from fedjax_async.config.paths import FIELDS
from fedjax_async.config.roles import ROLES, roles_of, usual_role

USUAL = {
    "tuned": ["lr", "batch_size", "epochs", "optimizer", "optimizer.momentum", "decay.steps", "method.mixing",
              "timing.size", "max_staleness"],
    "compared": ["method", "timing", "compress", "compress.ratio", "client", "engine"],
    "world": ["dataset", "partition", "partition.alpha", "clients", "delay", "delay.sigma", "faults.drop.probability",
              "availability", "model", "time", "updates", "eval_time", "test_fraction"],
    "seed": ["seed"],
}  # fmt: skip


def test_usual_roles():
    for role, paths in USUAL.items():
        assert {path: usual_role(path) for path in paths} == dict.fromkeys(paths, role)
    assert {usual_role(name) for name in FIELDS} == set(ROLES)
    assert [name for name in FIELDS if usual_role(name) == "seed"] == ["seed"]


def test_given_roles_replace_the_usual_ones():
    paths = ["method", "method.mixing", "delay", "seed"]
    given = {"method.mixing": "compared", "delay": "tuned", "seed": "seed"}
    assert roles_of(paths, given) == dict(zip(paths, ("compared", "compared", "tuned", "seed")))
    assert roles_of(paths) == roles_of(paths, {}) and list(roles_of(paths)) == paths


@pytest.mark.parametrize(("given", "says"), [
    ({"lr": "tune"}, r"roles\['lr'\] = 'tune': must be one of tuned, compared, world, seed"),
    ({"epochs": "tuned"}, "roles = 'epochs': must be a setting that is swept: lr, seed"),
    ({"lr": "seed"}, r"roles\['lr'\] = 'seed': must be seed for the setting seed, and another role for other"),
    ({"seed": "world"}, r"roles\['seed'\] = 'world': must be seed for the setting seed"),
    ({"lr": 3}, r"roles\['lr'\] = 3: must be one of tuned"),
])  # fmt: skip
def test_bad_roles(given, says):
    with pytest.raises(ValueError, match=says):
        roles_of(["lr", "seed"], given)
