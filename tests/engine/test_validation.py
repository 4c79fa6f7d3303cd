"""Scores on the validation parts: right in both engines, and without an effect on anything else."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from fedjax_async.config import Settings, prepare
from fedjax_async.config.sweeping import plan_groups
from fedjax_async.data import Federation, federate
from fedjax_async.data.federated import client_rows
from fedjax_async.engine import run_reference, run_waves
from fedjax_async.engine.evaluation import validation_part
from fedjax_async.engine.run import run_stack
from fedjax_async.engine.stack import layout_of, make_member, make_stack, shape_of
from tests.engine.problem import CLASSES, case, data

ROWS = np.array([5, 17, 30, 2, 11, 8], np.int32)  # no client holds the entry 30


def held_out(rows=ROWS, sizes=(2, 0, 1, 2, 0)):
    """The data with ``rows`` held out, ``sizes`` of them by each client: 0, 2, 3 in turn, with a gap after 0."""
    size = np.array(sizes, np.int32)
    offset = np.array([0, 0, 3, 4, 0], np.int32)
    return data()._replace(validation_order=rows, validation_offset=offset, validation_size=size)


def experiment(who, **options):
    one = case("fedasync", updates=12, **options)
    return one._replace(components=one.components._replace(data=who))


def in_numpy(params, x, y):
    """Loss and accuracy of the MLP in float64, without the package."""
    hidden = np.tanh(x @ np.float64(params["hidden"]["kernel"]))
    logits = hidden @ np.float64(params["output"]["kernel"]) + np.float64(params["output"]["bias"])
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return -log_p[np.arange(len(y)), y].mean(), np.mean(logits.argmax(axis=1) == y)


@pytest.mark.float64
@pytest.mark.parametrize("engine", [run_waves, run_reference])
def test_the_scores_are_means_over_all_held_out_rows(engine):
    who, rows = held_out(), np.array([5, 17, 2, 11, 8])
    given = experiment(who)
    found = engine(*given)
    for at, params in ((0, given.params), (-1, found.params)):
        loss, accuracy = in_numpy(params, who.x[rows], who.y[rows])
        np.testing.assert_allclose(found.scores["validation_loss"][at], loss, rtol=1e-9)
        np.testing.assert_allclose(found.scores["validation_accuracy"][at], accuracy, rtol=1e-12)
    assert len(found.scores["validation_loss"]) == len(given.points.time)
    assert np.ptp(found.scores["validation_loss"]) > 1e-3, "the run must have trained"


def test_validation_changes_nothing_else_and_nothing_else_changes_it():
    who = held_out()
    y, test_y = who.y.copy(), (who.test_y + 1) % CLASSES
    y[ROWS] = (y[ROWS] + 1) % CLASSES
    unseen = np.setdiff1d(np.arange(len(who.y)), ROWS).astype(np.int32)  # so that no client trains on the rows
    size = np.array([6, 4, 10, 6, 1], np.int32)
    trained = {"order": unseen, "size": size, "offset": (np.cumsum(size) - size).astype(np.int32)}
    plain = run_waves(*experiment(data()._replace(**trained)))
    have, relabelled, retested = (
        run_waves(*experiment(one._replace(**trained))) for one in (who, who._replace(y=y), who._replace(test_y=test_y))
    )
    for other in (have, relabelled, retested):
        jax.tree.map(np.testing.assert_array_equal, other.params, plain.params)
    for name in ("loss", "accuracy"):
        for other in (have, relabelled):
            np.testing.assert_array_equal(other.scores[name], plain.scores[name])
        np.testing.assert_array_equal(retested.scores[f"validation_{name}"], have.scores[f"validation_{name}"])
    assert not np.array_equal(relabelled.scores["validation_loss"], have.scores["validation_loss"])
    assert not np.array_equal(retested.scores["loss"], have.scores["loss"])
    assert "validation_loss" not in plain.scores


@pytest.mark.float64
def test_runs_side_by_side_have_their_own_parts():
    parts = [held_out(), held_out(ROWS[::-1].copy(), (1, 0, 1, 0, 0))]
    members = [make_member(*experiment(who, seed=seed)) for seed, who in enumerate(parts)]
    made = layout_of(members)
    outcomes = run_stack(make_stack(members, made, shape_of(made)))
    for one, have in zip(members, outcomes, strict=True):
        want = run_waves(*one[:5])
        for name, values in want.scores.items():
            np.testing.assert_allclose(have.scores[name], values, rtol=1e-11, atol=1e-13)
    assert not np.allclose(outcomes[0].scores["validation_loss"][0], outcomes[1].scores["validation_loss"][0])


def test_no_rows_no_part_and_streamed_data_bring_their_own():
    assert validation_part(data()) is None and validation_part(held_out(sizes=(0,) * 5)) is None
    part = validation_part(held_out(), 8)
    assert part.x is None and part.size == 5
    np.testing.assert_array_equal(part.order, [5, 17, 2, 11, 8, 0, 0, 0])
    copied = validation_part(held_out()._replace(streamed=True))
    np.testing.assert_array_equal(copied.x[copied.order], data().x[part.order[:5]])
    np.testing.assert_array_equal(copied.y[copied.order], data().y[part.order[:5]])


def test_data_that_come_by_clients_are_cut_too():
    sizes = (9, 4, 13, 6)
    whole = data(sizes)._replace(x=data(sizes).x.astype(np.float32), test_x=data(sizes).test_x.astype(np.float32))
    settings = Settings(model="logistic", clients=4, updates=4, steps=1, validation_fraction=0.25)
    cut, again, other = (
        prepare(dataclasses.replace(settings, seed=seed), data=whole).components.data for seed in (0, 0, 1)
    )
    by_federation = federate(Federation("blobs", lambda clients, seed: whole), None, 4, 0, validation_fraction=0.25)
    for one in (cut, by_federation):
        np.testing.assert_array_equal(one.validation_size, [2, 1, 3, 2])  # a quarter of each size; halves round to even
        for i in range(4):
            held = one.validation_order[one.validation_offset[i] :][: one.validation_size[i]]
            np.testing.assert_array_equal(np.sort([*client_rows(one, i), *held]), np.sort(client_rows(whole, i)))
    np.testing.assert_array_equal(cut.order, again.order)
    assert not np.array_equal(cut.order, other.order) and len(cut.order) == len(other.order) == 32
    with pytest.raises(ValueError, match=r"^validation_fraction = 0\.25: must be None: the clients of blobs have"):
        prepare(settings, data=cut)
    with pytest.raises(ValueError, match=r"^validation_fraction = 0\.25: must be used with at least 2 examples"):
        prepare(settings, data=whole._replace(size=np.array([9, 4, 13, 1], np.int32)))


def test_runs_with_and_without_a_part_do_not_share_a_program():
    base = {"model": "logistic", "clients": 4, "updates": 4, "steps": 1, "partition": "iid"}
    settings = [
        Settings(**base, validation_fraction=fraction, seed=seed) for fraction in (None, 0.2) for seed in (0, 1)
    ]
    groups = plan_groups(settings, lanes=1)
    assert [group.members for group in groups] == [(0, 1), (2, 3)]
    assert prepare(settings[2]).components.data.validation_size.sum() == 1000
