"""Learn on two worlds whom to send next and how much an arrival counts, for ``worlds.py`` to test on others.

    python experiments/policies/learn.py --scale laptop      # a quarter of an hour on 2 cores; goes on where it stopped

The cross-entropy method (Rubinstein 1999) looks for numbers that make the validation accuracy high all along a run: its
mean over the evaluations and the training worlds. Each generation draws candidates from a Gaussian, runs them with a
seed of its own, and moves the Gaussian to the best quarter. Two searches have the same number of runs:

* learned choice: the weights and the temperature of the policy ``linear``;
* learned mixing: FedBuff's server rate and staleness exponent, clients drawn uniformly.

The row "learned both" joins what the two have found; nothing is searched for it.

The best server rate of plain FedBuff is looked for on a grid, with the first seed. No test example is used, and no
world of ``worlds.py``. ``learn.csv`` has a row a search; every generation is kept in ``OUT/search.json``.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "common"))

from variants import options, parse, report
from worlds import COMMON, SMALL, TIMING

from fedjax_async import simulate
from fedjax_async.base.notices import RunWarning

WORLDS: list[dict[str, Any]] = [
    {"partition": "dirichlet:alpha=0.3", "delay": "lognormal:heterogeneity=0.5"},
    {"partition": "shards:classes_per_client=3", "delay": "exponential:heterogeneity=1"},
]
RATES = (0.5, 1.0, 1.5, 2.0, 3.0)
FIRST_SEED = 100  # worlds.py has the seeds from 0 on
# of each search the numbers that it looks for: mean and deviation of the first Gaussian
CHOICE = {"loss": (0.5, 0.7), "speed": (0.5, 0.7), "examples": (0.3, 0.5), "age": (0.3, 0.5)}
CHOICE |= {"log temperature": (-1.0, 0.8)}
MIXING = {"log server_lr": (0.2, 0.5), "exponent": (0.5, 0.4)}
SEARCHES = {"learned choice": CHOICE, "learned mixing": MIXING}


def specs(numbers: dict[str, float], rate: float) -> tuple[str, str]:
    """Method and policy of a candidate, empty for none; ``rate``: the server's, unless it is among the numbers."""
    method = f"fedbuff:server_lr={rate:.4g}"
    if "exponent" in numbers:
        rate, exponent = math.exp(numbers["log server_lr"]), max(0.0, numbers["exponent"])
        method = f"fedbuff:server_lr={rate:.4g},exponent={exponent:.4g}"
    policy = ""  # planned, which is what uniform would do
    if "loss" in numbers:
        weights = ",".join(f"{name}={numbers[name]:.4g}" for name in ("loss", "speed", "examples", "age"))
        policy = f"linear:{weights},temperature={math.exp(numbers['log temperature']):.4g}"
    return method, policy


def reward(setting: dict[str, Any], method: str, policy: str, seed: int) -> float:
    """Mean validation accuracy over the evaluations and worlds; a run that diverges has what it has."""
    found = []
    for world in WORLDS:
        given = setting | world | {"method": f"{method}@{TIMING}", "policy": policy or None, "seed": seed}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RunWarning)  # uploads of a step that the time does not let complete
            run = simulate(**given)
        found.append(float(np.mean(run.evaluations["validation_accuracy"][1:])))
    return float(np.mean(found))


class Search:
    """The generations of one search; state that JSON keeps."""

    def __init__(self, name: str, state: dict[str, Any]) -> None:
        self.numbers = SEARCHES[name]
        begin = np.array(list(self.numbers.values()), float)
        self.state = state.setdefault(name, {"mean": begin[:, 0].tolist(), "std": begin[:, 1].tolist(), "rewards": []})

    def generation(self, setting: dict[str, Any], rate: float, size: int) -> None:
        """Draw, run, and move the Gaussian to the best quarter."""
        turn, mean, std = len(self.state["rewards"]), np.array(self.state["mean"]), np.array(self.state["std"])
        drawn = mean + std * np.random.default_rng([turn, len(mean)]).normal(size=(size, len(mean)))
        drawn[0] = mean
        candidates = [dict(zip(self.numbers, one.tolist())) for one in drawn]
        rewards = [reward(setting, *specs(one, rate), FIRST_SEED + turn) for one in candidates]
        best = drawn[np.argsort(rewards)[::-1][: max(2, size // 4)]]
        self.state |= {"mean": best.mean(axis=0).tolist(), "std": (0.7 * best.std(axis=0) + 0.3 * std).tolist()}
        self.state["rewards"].append(rewards)

    def found(self) -> dict[str, float]:
        """The mean of the last Gaussian."""
        return dict(zip(self.numbers, self.state["mean"]))


def main(given: argparse.Namespace) -> None:
    """Search, and write what was found."""
    smoke = given.scale == "smoke"
    setting = COMMON | (SMALL if smoke else {})
    generations, size = (1, 2) if smoke else (5, 12)
    file = given.out / "search.json"
    asked = {"setting": setting, "worlds": WORLDS, "timing": TIMING, "size": size}
    state: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"asked": asked}
    if state.get("asked") != asked:
        sys.exit(f"--out {given.out}: must be empty or hold the same search; {file.name} is of another")
    given.out.mkdir(parents=True, exist_ok=True)

    def keep() -> None:
        part = file.with_suffix(".part")
        part.write_text(json.dumps(state))
        part.replace(file)

    if "rates" not in state:
        rates = RATES[:1] if smoke else RATES
        plain = {f"{rate:g}": reward(setting, f"fedbuff:server_lr={rate}", "", FIRST_SEED) for rate in rates}
        state["rates"] = plain
        keep()
    rate = float(max(state["rates"], key=state["rates"].__getitem__))
    for name in SEARCHES:
        search = Search(name, state)
        while len(search.state["rewards"]) < generations:
            search.generation(setting, rate, size)
            keep()
            if not given.quiet:
                print(f"{name}, generation {len(search.state['rewards'])}: {np.mean(search.state['rewards'][-1]):.4f}")
    rows = [{"row": "rate", "method": f"fedbuff:server_lr={rate:g}", "policy": "uniform", "server_lr": rate}]
    rows[0] |= {"first reward (%)": 100 * state["rates"]["0.5"], "last reward (%)": 100 * max(state["rates"].values())}
    for name in SEARCHES:
        search = Search(name, state)
        method, policy = specs(search.found(), rate)
        first, last = (100 * search.state["rewards"][k][0] for k in (0, -1))
        row = {"row": name, "method": method, "policy": policy or "uniform", "server_lr": float("nan")}
        rows.append(row | {"first reward (%)": first, "last reward (%)": last})
    both = rows[-1] | {"row": "learned both", "policy": rows[-2]["policy"]}
    rows.append(both | {"first reward (%)": float("nan"), "last reward (%)": float("nan")})
    report(rows, given, decimals={"first reward (%)": 1, "last reward (%)": 1})


if __name__ == "__main__":
    main(parse(options(__doc__, "policies", "learn")))
