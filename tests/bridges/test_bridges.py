"""The page of the bridges is executed; a rule inside Flower's rounds does what the engine does.

Tests that need other packages are slow ones: ``python -m pytest -m slow tests/bridges/test_bridges.py``.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_async import models
from fedjax_async.bridges.flower import Rounds, facts_of, nodes_of_a_round, strategy
from fedjax_async.config.methods import method_of
from fedjax_async.models import read_arrays, write_arrays
from fedjax_async.types import Facts
from tests import forked
from tests.refusals import refusals

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = (ROOT / "experiments" / "bridges" / "README.md").read_text(encoding="utf-8")
LOOP, OURS, FLOWER = re.findall(r"```py(?:thon)?\n(.*?)```", PAGE, re.DOTALL)
SHAPES = {"conv1": (4, 3, 3, 3), "norm": (4,), "fc1": (16, 144), "output": (5, 16)}  # of PyTorch's weights


def run(code, folder):
    """Run a code block of the page in a process of its own."""
    (folder / "example.py").write_text(code)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RAY_DEDUP_LOGS": "0"}
    command = [sys.executable, "example.py"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_page_says_how_short_ours_is():
    assert OURS.count("\n") < 32 and LOOP.count("\n") > OURS.count("\n")


@pytest.mark.usefixtures("commands_compile_as_here")
def test_ours_runs_from_a_file_of_pytorch_and_writes_one(tmp_path):
    rng = np.random.default_rng(0)
    start = {f"{layer}.weight": rng.normal(size=shape) / shape[-1] for layer, shape in SHAPES.items()}
    start |= {f"{layer}.bias": np.zeros(shape[0]) for layer, shape in SHAPES.items()}
    start = {name: array.astype(np.float32) for name, array in start.items()}
    write_arrays(tmp_path / "start.safetensors", start, torch=True)
    (tmp_path / "example.py").write_text(OURS)
    done = forked.python([str(tmp_path / "example.py")], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = models.read_safetensors(tmp_path / "ours.safetensors")
    assert found.keys() == start.keys()
    for name, array in start.items():
        assert found[name].shape == array.shape and np.abs(found[name] - array).max() > 1e-4


def test_the_changes_of_the_pages_table_are_accepted_for_its_job(tmp_path):
    cells = [code for line in PAGE.splitlines() if line.startswith("| ") for code in re.findall(r"`(.*?)`", line)]
    sweeps = [code for code in cells if code.startswith("sweep(")]
    changes = [code for code in cells if code not in sweeps]
    assert len(sweeps) == 1 and len(changes) >= 4, cells
    job = OURS.partition("run = ")[0] + "job |= {'model': 'logistic', 'initial': None, 'steps': 1}\n"
    code = f"from fedjax_async import Settings, sweep\n{job}assert len({sweeps[0]}.points) == 12\n"
    code += "".join(f"Settings(**{{**job, **dict({change})}})\n" for change in changes)
    (tmp_path / "changes.py").write_text(code)
    done = forked.python([str(tmp_path / "changes.py")], cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_ours_ends_where_the_loop_of_pytorch_does(tmp_path):
    assert importlib.util.find_spec("torch") is not None, "this test needs PyTorch: pip install torch safetensors"
    run(LOOP, tmp_path)
    run(OURS, tmp_path)
    want, found = (read_arrays(tmp_path / name) for name in ("end.safetensors", "ours.safetensors"))
    start = read_arrays(tmp_path / "start.safetensors")
    assert set(want) == set(found)
    for name, array in want.items():
        np.testing.assert_allclose(found[name], array, atol=2e-5)
        assert np.abs(array - start[name]).max() > 1e-3


def rounds_of(method, size, clients=3):
    chosen = method_of(method)
    facts = Facts(clients, size == 1, 12, 4)
    made = Rounds(chosen.rule.make(), facts, size, method)
    made.begin({"w": jnp.zeros(2)})
    return made


def play(made, replies):
    """One round: the nodes get the model, and reply in order with that model plus a number."""
    for node, _, _ in replies:
        made.message(node, 1)
    for count, (node, change, weight) in enumerate(replies, start=1):
        made.reply(node, {"w": made.sent[node][0]["w"] + change}, weight, 1, count == len(replies))
    return np.asarray(made.rule.params(made.state)["w"])


def asked_for_a_reply():
    made = rounds_of("fedavg", None)
    made.begin(SENT)
    made.message(5, 1)
    return made


def test_a_rule_may_draw_at_each_reply():
    """The rule of adpsgd, which draws a neighbour, had no random key; averages do not move the mean of its models."""
    np.testing.assert_allclose(play(rounds_of("adpsgd", 1), [(70, 1.0, 1), (50, 4.0, 3)]), 5 / 3, rtol=1e-6)


def test_a_round_is_a_server_step_of_fedavg_and_bad_replies_are_rejected():
    made = rounds_of("fedavg", None)
    np.testing.assert_allclose(play(made, [(70, 1.0, 1), (50, 4.0, 3)]), 3.25)
    np.testing.assert_allclose(play(made, [(50, 1.0, 1), (60, np.nan, 9), (70, 2.0, 1)]), 4.75)
    assert (made.steps, made.numbers) == (2, {70: 0, 50: 1, 60: 2})
    np.testing.assert_allclose(play(made, [(50, 1.0, 1), (60, 2.0, np.inf), (70, 7.0, 0)]), 5.75)
    with pytest.raises(ValueError, match=r"^nodes = 4: must be at most 3"):
        made.message(80, 1)
    made.begin({"w": np.full(2, 9.0)})
    assert (made.steps, made.numbers, made.model["w"].tolist()) == (0, {}, [9.0, 9.0])


def test_fednova_reads_the_local_steps_of_a_reply():
    """tau_eff sum p_i d_i / tau_i, by hand: p = 1/4, 3/4, tau = 2, 6."""
    made = rounds_of("fednova", None)
    for node in (1, 2):
        made.message(node, 1)
    with pytest.raises(ValueError, match=r"^reply of node 1: metric local-steps = None: must be a whole number"):
        made.reply(1, {"w": np.ones(2)}, 1, 1, False)
    made.reply(1, {"w": np.ones(2)}, 1, 1, False, 2)
    made.reply(2, {"w": np.full(2, 4.0)}, 3, 1, True, 6)
    np.testing.assert_allclose(made.model["w"], 5 * (1 / 4 / 2 + 3 * 4 / 4 / 6), rtol=1e-6)


SENT = {"w": np.zeros(2), "seen": np.array(0)}
test_replies_that_do_not_fit_are_refused = refusals(
    ({"w": SENT["w"]}, 1, r"^reply of node 5: arrays = \{'w': 'floats \[2\]'\}: must be \{'w': .*'seen'"),
    (SENT | {"w": np.zeros(3)}, 1, r"^reply of node 5: arrays = \{'w': 'floats \[3\]'"),
    (SENT | {"seen": np.array(0.5)}, 1, r"^reply of node 5: arrays = .*'seen': 'floats \[\]'\}: must be"),
    (SENT, None, "^reply of node 5: weight = None: must be a number"),
    (SENT, [1.0], r"^reply of node 5: weight = \[1\.0\]: must be a number"),
    by=lambda arrays, weight: asked_for_a_reply().reply(5, arrays, weight, 1, True),
)


def test_a_node_replies_once_and_arrays_of_whole_numbers_are_the_newest():
    made = asked_for_a_reply()
    made.reply(5, SENT | {"seen": np.array(7)}, 1, 1, True)
    assert made.model["seen"] == 7
    with pytest.raises(ValueError, match=r"^node of a reply = 5: must be one that was sent a model, once: \[\]"):
        made.reply(5, SENT, 1, 1, True)


def test_a_rule_that_asks_for_the_work_of_a_job_is_refused():
    plain = rounds_of("fedavg", None).rule

    def dispatch(state, memory, request):
        message, memory = plain.dispatch(state, memory, request)
        return message._replace(params={"w": message.params["w"] * request.weight}), memory

    with pytest.raises(ValueError, match=r"^method = 'own': must be one with messages that do not depend on the steps"):
        Rounds(plain._replace(dispatch=dispatch), Facts(3), None, "own").begin({"w": np.zeros(2)})


def flowers(fraction_train=1.0, min_train_nodes=2, min_available_nodes=2):
    """Options and defaults of Flower's FedAvg."""


def test_how_many_replies_a_run_has():
    assert nodes_of_a_round(100, flowers, {}) == 100
    assert nodes_of_a_round(100, flowers, {"fraction_train": 0.01}) == 2, "Flower samples min_train_nodes at least"
    assert facts_of(100, 3, None, 2) == Facts(100, False, 6, 3) and facts_of(100, 3, 4, 2).server_steps == 1


test_options_that_flower_cannot_use_are_refused = refusals(
    ({"fraction_train": "x"}, "^fraction_train = 'x': must be above 0 and at most 1"),
    ({"fraction_train": 0}, "^fraction_train = 0: "),
    ({"min_train_nodes": 6}, "^min_train_nodes = 6: must be a whole number from 1 to 5"),
    ({"fraction": 1.0}, "^option of strategy = 'fraction': must be one of fraction_train, min"),
    by=lambda options: nodes_of_a_round(5, flowers, options),
)
test_methods_that_flower_cannot_run_are_refused = refusals(
    *(
        (method, 3, f"^method = '{method}': must be one whose clients train by themselves")
        for method in ("scaffold", "asynccurve", "asynflc", "floco")
    ),
    ("pisces", 3, "^method = 'pisces': must be one without a policy"),
    ("fedavg@window:length=3", 3, "^timing of the method = 'window': "),
    ("fedavg", 0, "^rounds = 0"),
    by=lambda method, rounds: strategy(method, clients=2, rounds=rounds),
)
# With fewer replies than a step needs the model became NaN; of Krum, a step of so few has no guarantee.
test_a_buffer_that_holds_fewer_replies_than_a_step_or_never_fills_is_refused = refusals(
    (rounds_of, "fedmedian:size=2@cohort", None, "^size of the rule's buffer = 2: must be at least 3, the most arr"),
    (rounds_of, "krum:byzantine=3,size=10@cohort", None, "^uploads of the longest server step = 3: must be "),
    (facts_of, 5, 1, 10, 5, r"^size = 10: must be at most the 5 replies of the run \(it would never fill"),
    by=lambda call, *given: call(*given),
)


def test_every_reply_is_a_step_and_later_ones_are_stale():
    """FedAsync by hand: x <- x + a s(tau) (start + change - x), s(tau) = (1 + tau)^-0.5."""
    made, x = rounds_of("fedasync:mixing=0.5", 1), 0.0
    for tau, change in enumerate((1.0, 4.0, -2.0)):
        x += 0.5 * (1 + tau) ** -0.5 * (change - x)
    np.testing.assert_allclose(play(made, [(1, 1.0, 1), (2, 4.0, 1), (3, -2.0, 1)]), x, rtol=1e-6)
    assert made.steps == 3


def test_a_buffer_goes_on_in_the_next_round_and_a_memory_belongs_to_its_node():
    made = rounds_of("asgd", 2)
    play(made, [(1, 1.0, 1), (2, 4.0, 1), (3, -2.0, 1)])
    assert (made.steps, made.waiting) == (1, 1)
    own = rounds_of("orthofl", 1)
    play(own, [(1, 1.0, 1), (2, 4.0, 1)])
    models_of = [np.asarray(own.message(node, 2)["w"]) for node in (1, 2)]
    assert np.abs(models_of[0] - models_of[1]).max() > 1e-3, "OrthoFL's clients have models of their own"


def test_a_buffer_of_as_many_replies_as_a_step_is_used():
    made = rounds_of("fedmedian:size=3@cohort", None)
    np.testing.assert_allclose(play(made, [(1, 1.0, 1), (2, 2.0, 1), (3, 6.0, 1)]), 2.0)


STARTS = """
import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.simulation import run_simulation
from fedjax_async.bridges.flower import strategy

client, server = ClientApp(), ServerApp()
WRONG = [
    ({"arrays": MetricRecord({"x": 1})}, "array_records = 0: must be one"),
    ({"more": MetricRecord({"x": 1})}, "metric_records = 2: must be one"),
    ({"metrics": MetricRecord({"x": 1})}, "weight = None: must be a number >= 0, in the metrics"),
]

@client.train()
def train(message, context):
    (w,) = message.content["arrays"].to_numpy_ndarrays()
    found = {"arrays": ArrayRecord([w + 1]), "metrics": MetricRecord({"num-examples": 2})}
    wrong = message.content["config"].get("wrong")
    return Message(content=RecordDict(found | ({} if wrong is None else WRONG[wrong][0])), reply_to=message)

@server.main()
def main(grid, context):
    made = strategy("fedavgm:momentum=0.5", clients=2, rounds=2, fraction_evaluate=0.0)
    for start in (0.0, 5.0):
        found = made.start(grid=grid, initial_arrays=ArrayRecord([np.full(2, start)]), num_rounds=2)
        np.testing.assert_allclose(found.arrays.to_numpy_ndarrays()[0], start + 2.5)
    for number, (_, message) in enumerate(WRONG):
        given = {"num_rounds": 1, "train_config": ConfigRecord({"wrong": number})}
        try:
            made.start(grid=grid, initial_arrays=ArrayRecord([np.zeros(2)]), **given)
        except ValueError as error:
            assert str(error).startswith("reply of node ") and str(error).endswith(": " + message), error
        else:
            raise AssertionError(message)
    open("passed", "w").close()

run_simulation(server, client, num_supernodes=2)
"""


@pytest.mark.slow
def test_a_strategy_starts_anew_and_names_what_is_wrong_in_a_reply(tmp_path):
    assert importlib.util.find_spec("flwr") is not None, "this test needs Flower: pip install '.[flower]'"
    run(STARTS, tmp_path)
    assert (tmp_path / "passed").exists()


@pytest.mark.slow
def test_a_local_simulation_of_flower(tmp_path):
    """The released example, and rules that Flower has too: both implementations end with the same weights."""
    assert importlib.util.find_spec("flwr") is not None, "this test needs Flower: pip install '.[flower]'"
    ours = 'strategy("fedadam:server_lr=0.5", clients=4, rounds=3, fraction_evaluate=0.0)'
    options = "min_train_nodes=4, min_available_nodes=4, fraction_evaluate=0.0"
    assert FLOWER.count(ours) == 1

    def weights(made):
        run("from flwr.serverapp.strategy import FedAvg, FedAvgM\n" + FLOWER.replace(ours, made), tmp_path)
        return np.load(tmp_path / "weights.npy")

    for method, theirs in (
        ("fedavgm:server_lr=0.8,momentum=0.5", "FedAvgM(server_learning_rate=0.8, server_momentum=0.5, {})"),
        ("fedavg", "FedAvg({})"),
        ("orthofl", None),
    ):
        found = weights(f'strategy("{method}", clients=4, rounds=3, {options})')
        assert found.dtype == np.float64 and np.abs(found - [1, 2, 3]).max() < 2
        if theirs is not None:
            np.testing.assert_allclose(found, weights(theirs.format(options)), rtol=1e-5)
    run(FLOWER, tmp_path)
