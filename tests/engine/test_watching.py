"""Observers get every evaluation once, in order, and the host waits only for evaluations that it must wait for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedjax_async.engine.evaluation import EvaluationPoints
from fedjax_async.engine.watching import UNDER_WAY, Observer, Verdict, Watcher


class Lazy:
    """A number on a device: reading it before it is ready counts as a wait."""

    def __init__(self, value, device):
        self.value, self.device, self.ready = value, device, False

    def is_ready(self):
        return self.ready

    def __array__(self, dtype=None, copy=None):
        if not self.ready:
            self.device.append(self.value)
        return np.array(self.value, dtype)


def watching(observe, *position):
    return Watcher([EvaluationPoints(np.array(position), np.arange(len(position), dtype=float))], [observe])


def test_the_host_waits_only_where_too_many_are_under_way():
    waits, seen = [], []
    observer = Observer(lambda row, scores, again: seen.append((row, float(scores["loss"]))) or Verdict(), False)
    watcher, lazy = watching(observer, *range(10)), [Lazy(float(i), waits) for i in range(10)]
    for i, value in enumerate(lazy[:UNDER_WAY]):
        watcher.add((0, i), {"loss": value}, None)
    assert seen == [] and waits == []
    lazy[0].ready = lazy[1].ready = True
    watcher.hand_over()
    assert [row for row, _ in seen] == [0, 1] and waits == []
    for i, value in enumerate(lazy[UNDER_WAY:], UNDER_WAY):
        watcher.add((0, i), {"loss": value}, None)
    assert len(seen) == 10 - UNDER_WAY and waits == [float(i) for i in range(2, 10 - UNDER_WAY)]
    watcher.hand_over(wait=True)
    assert seen == [(i, float(i)) for i in range(10)]


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=12), st.data())
def test_the_verdicts_decide_and_a_resumed_watcher_ends_the_same(verdicts, data):
    """The row that stops is the first one that asks to; the model kept is the last one asked for until then."""
    position = np.sort(data.draw(st.lists(st.integers(0, 4), min_size=len(verdicts), max_size=len(verdicts))))
    again_of, places = [], np.unique(position).tolist()
    scores = {(0, p): {"loss": np.float32(p)} for p in places}

    def observe(row, scores, again):
        again_of.append((row, again))
        return Verdict(*verdicts[row])

    def watcher(upto):
        """One that has got the evaluations of the first places."""
        again_of.clear()
        made = watching(Observer(observe, True), *position)
        for place in list(scores)[:upto]:
            made.add(place, scores[place], {"w": np.array(place[1])})
        return made

    whole = watcher(len(places))
    stop = next((row for row, (_, stops) in enumerate(verdicts) if stops), None)
    until = len(verdicts) if stop is None else stop + 1
    kept = [row for row in range(until) if verdicts[row][0]]
    assert [row for row, _ in again_of] == list(range(until))
    assert (whole.ends[0][0] if whole.ends else None) == stop and whole.all_ended == (stop is not None)
    assert (whole.kept[0][0] if whole.kept else None) == (kept[-1] if kept else None)
    for row, model in (*whole.kept.values(), *whole.ends.values()):
        assert model["w"] == position[row]

    cut = data.draw(st.integers(0, len(places)))
    begun, resumed = watcher(cut), watcher(0)
    resumed.restore({place: scores[place] for place in list(scores)[:cut]}, begun.models)
    assert all(again for _, again in again_of)
    for place in list(scores)[cut:]:
        resumed.add(place, scores[place], {"w": np.array(place[1])})
    assert (resumed.kept, resumed.ends) == (whole.kept, whole.ends)


def test_a_model_that_the_checkpoint_lacks_is_asked_for_by_name():
    watcher = watching(Observer(lambda row, scores, again: Verdict(keep=True), True), 0, 1, 2)
    with pytest.raises(ValueError, match=r"must hold the model of evaluation 1, .*keep_best"):
        watcher.restore({(0, 0): {"loss": 1.0}, (0, 1): {"loss": 0.5}}, {})
