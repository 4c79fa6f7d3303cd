"""An engine for sweeps that returns made-up runs without training, to test everything around the training."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fedjax_async.config import Settings
from fedjax_async.config.settings import as_dict
from fedjax_async.config.sweeping import SweepGroup
from fedjax_async.results import running, sweeps
from fedjax_async.types import Run
from tests.results.made_up import make_run

STACK = 2
UPDATES = len(make_run().updates["client"])


def score(settings: Settings) -> float:
    """The final accuracy of a made-up run: larger learning rates are better, odd seeds a little worse."""
    return round(min(0.2 + (0.01 if settings.lr is None else settings.lr) - 0.01 * (settings.seed % 2), 1.0), 6)


def made_up(settings: Settings) -> Run:
    run = make_run([0.1, 0.15, score(settings)], method=settings.method)
    counters = run.counters | {"updates": UPDATES, "server_steps": UPDATES, "rejected": 1, "programs": 5}
    return run._replace(settings=as_dict(settings), counters=counters)


def plan_groups(settings: Sequence[Settings], *, lanes: int | None = None, **options: Any) -> list[SweepGroup]:
    """One group per method, two runs per stack."""
    by_method: dict[str, list[int]] = {}
    for place, each in enumerate(settings):
        by_method.setdefault(str(each.method).partition(":")[0], []).append(place)
    groups = []
    for method, members in by_method.items():
        stacks = tuple(tuple(members[low : low + STACK]) for low in range(0, len(members), STACK))
        updates = (UPDATES,) * len(members)
        groups.append(SweepGroup(tuple(members), stacks, lanes or 1, 1, 2_500_000_000, updates, f"{method}, made up"))
    return groups


class Engine:
    """Replaces ``config.sweeping``; ``trained`` lists the settings it was given; it fails after ``fail_after`` runs."""

    def __init__(self, error: BaseException | None = None, fail_after: int = 0) -> None:
        self.trained: list[Settings] = []
        self.error, self.fail_after = error, fail_after
        self.folders: set[Path | None] = set()
        self.plan_groups = plan_groups

    def execute_group(
        self,
        settings: Sequence[Settings],
        group: SweepGroup,
        *,
        on_finished: Any,
        progress: Any,
        folder: Any = None,
        **options: Any,
    ) -> None:
        self.folders.add(folder)
        for number, place in enumerate(itertools.chain(*group.stacks), start=1):
            if self.error is not None and len(self.trained) == self.fail_after:
                raise self.error
            self.trained.append(settings[place])
            progress(number * UPDATES, group.updates, time=1.0, staleness=0.5, accuracy=0.5)
            on_finished(place, made_up(settings[place]))


def use(monkeypatch: pytest.MonkeyPatch, *args: Any, **options: Any) -> Engine:
    """Replace the real engine by an :class:`Engine`."""
    engine = Engine(*args, **options)
    for module in (sweeps, running):
        monkeypatch.setattr(module, "sweeping", engine)
    return engine
