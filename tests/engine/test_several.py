"""Several waves in one call, and local steps that are compiled in: fewer calls, the same results."""

from __future__ import annotations

import pytest

from fedjax_async import Settings
from fedjax_async.config import execute, prepare
from fedjax_async.engine import Every, run, run_waves
from fedjax_async.engine.batches import Batch, Segment
from fedjax_async.engine.checkpoint import Keeper
from fedjax_async.engine.several import Piece, work_of
from tests.engine.problem import case, same, stack_of

# options to compare with the default run of the same problem, in the same batches
WAYS = {"both": {"fixed_steps": True, "waves_per_call": 3}, "unequal steps": {"waves_per_call": 3}}


def learned(outcome):
    return outcome.params, outcome.scores, outcome.records


@pytest.fixture
def calls(monkeypatch):
    """The pieces of each call that trains and receives."""
    made = []
    monkeypatch.setattr(run, "work_of", lambda pieces, *given: made.append(pieces) or work_of(pieces, *given))
    return made


@pytest.mark.slow_cases("unequal steps")
@pytest.mark.parametrize("way", WAYS)
def test_the_results_are_the_same(way, calls):
    options = WAYS[way]
    usual = {"batching": "vmap", "lanes": 1, "max_width": 4}
    equal = {"steps": 3} if "fixed_steps" in options else {}
    given = case("fedbuff", "buffer:size=2,concurrency=4", every=Every(updates=7), **equal)
    want, have = (run_waves(*given, **usual, **more) for more in ({}, options))
    same(learned(have), learned(want))
    assert have.counters["waves"] == want.counters["waves"] > 6
    assert len(calls) < have.counters["waves"] and max(map(len, calls)) <= options["waves_per_call"]
    turns = [piece.turn for pieces in calls for piece in pieces if piece.turn is not None]
    assert turns == list(range(have.counters["batches"]))
    ends = {pieces[-1].high for pieces in calls}
    assert set(range(7, 25, 7)) <= ends, "an evaluation sees exactly the arrivals before it"


def test_a_resumed_run_goes_on_at_a_whole_wave(tmp_path, calls):
    given = case("fedbuff", "buffer:size=2,concurrency=4", steps=3)
    options = {"batching": "loop", "fixed_steps": True, "waves_per_call": 4}

    def killed(done, total, **status):
        if done >= 12:
            raise KeyboardInterrupt

    want = run_waves(*given, batching="loop", lanes=1)
    with pytest.raises(KeyboardInterrupt):
        run_waves(*given, **options, keeper=Keeper(tmp_path, 4, {}), progress=killed)
    calls.clear()
    same(learned(run_waves(*given, **options, keeper=Keeper(tmp_path, 4, {}))), learned(want))
    assert calls[0][0].turn is not None and calls[0][0].low > 0


def test_with_fixed_steps_xla_knows_the_length_of_the_loop_and_no_unfinished_job_is_kept():
    one = case("fedbuff", "buffer:size=2,concurrency=4", steps=3)

    def compiled(fixed_steps):
        stack = stack_of(one, batching="vmap", fixed_steps=fixed_steps)
        return stack.programs.train[max(stack.layout.widths)], stack.num_bytes

    (fixed, less), (counted, more) = compiled(True), compiled(False)
    known = 'known_trip_count":{"n":"3"'
    assert known in fixed.as_text() and known not in counted.as_text()
    assert less < more, "bytes on the device"


def test_what_cannot_be_is_refused():
    base = {"model": "logistic", "clients": 3, "updates": 4}
    unequal = prepare(Settings(**base, fixed_steps=True, partition="dirichlet:alpha=0.5"))
    with pytest.raises(
        ValueError, match=r"^fixed_steps = True: must be False where jobs differ in local steps \(from "
    ):
        execute(unequal)
    with pytest.raises(ValueError, match=r"^lanes = 2: must be 1 with waves_per_call"):
        execute(prepare(Settings(**base, waves_per_call=2, lanes=2)))
    with pytest.raises(ValueError, match=r"^waves_per_call = 1: must be a whole number >= 2"):
        Settings(**base, waves_per_call=1)


def test_work_is_told_wide_before_narrow():
    """A batch of five jobs that narrows to two, and a rest that is only received."""
    batch = Batch(0, 10, 5, [Segment(6, 0, 3), Segment(2, 3, 9)])
    work = work_of([Piece(0, 10, 13), Piece(None, 13, 15)], [[batch]], (2, 6), None, 3)
    assert work.tolist() == [
        [[10, 5, 0, 3], [10, 5, 3, 9], [10, 13, 0, 0]],
        [[0] * 4, [0] * 4, [13, 15, 0, 0]],
        [[0] * 4] * 3,
    ]
