"""Factories registered by the user, of nodes too: their names work like built-in ones; files that register them."""

from __future__ import annotations

import os
import sys

import jax
import numpy as np
import optax
import pytest

from fedjax_async import Settings, Spec, models, register, server, simulate
from fedjax_async.base import factories, inputs, registry
from fedjax_async.clock import AVAILABILITY, DELAYS, FAULTS, NETWORKS, TIMINGS, Until, plan
from fedjax_async.compress import COMPRESSORS
from fedjax_async.config import method_options, plan_groups, plugins, prepare, registries
from fedjax_async.config.grid import expand
from fedjax_async.config.settings import as_dict, from_dict
from fedjax_async.data import PARTITIONERS, federate
from fedjax_async.data.embedded import fashion_mnist_6k
from fedjax_async.local import local_training
from fedjax_async.results.begun import load_plugins, save_plugins
from fedjax_async.types import Traced
from tests.refusals import refusals
from tests.told import is_refused, refusal, same

HIDDEN = iter([1])
SMALL = {"model": "logistic", "clients": 4, "steps": 1, "updates": 6, "eval_updates": 6}
pytestmark = pytest.mark.usefixtures("nothing_stays_registered")


def equal(one, other):
    same((one.params, one.schedule.time), (other.params, other.schedule.time))


def rule(*, server_lr: Traced = 1.0):
    return server.fedbuff(server_lr=server_lr)


def mlp(*, num_classes, input_shape, width=1):
    return models.make(f"mlp:hidden={width}", num_classes=num_classes, input_shape=input_shape)


# kind -> factory, the spec that uses it, and the built-in spec that does the same; they fit together in one run
KINDS = {
    "method": (rule, "mine:server_lr=0.5", "fedbuff:server_lr=0.5"),
    "timing": (lambda *, size=1: TIMINGS["buffer"](size=size), "mine:size=2", "buffer:size=2"),
    "delay": (lambda *, mean=1.0: DELAYS["lognormal"](mean=mean), "mine:mean=60", "lognormal:mean=60"),
    "availability": (lambda *, on=1.0: AVAILABILITY["sessions"](on=on), "mine:on=5+always", "sessions:on=5+always"),
    "faults": (lambda *, p=0.1: FAULTS["drop"](probability=p), "mine:p=0.3+late:extra=5",
               "drop:probability=0.3+late:extra=5"),
    "network": (lambda *, down=1e6: NETWORKS["link"](down=down), "mine:down=1e4", "link:down=1e4"),
    "dataset": (lambda *, n=5000: fashion_mnist_6k()._replace(name=f"of {n}"), "mine", "fashion_mnist_6k"),
    "partition": (lambda *, a=1.0: PARTITIONERS["dirichlet"](alpha=a), "mine:a=0.5", "dirichlet:alpha=0.5"),
    "model": (mlp, "mine:width=4", "mlp:hidden=4"),
    "optimizer": (lambda lr, *, m=0.0: optax.sgd(lr, m), "mine:m=0.5", "sgd:momentum=0.5"),
    "decay": (lambda *, steps=1: optax.linear_schedule(1.0, 1.0, steps), "mine:steps=3", "constant"),
    "compress": (lambda *, ratio=0.5: COMPRESSORS["topk"](ratio=ratio), "mine:ratio=0.1", "topk:ratio=0.1"),
}  # fmt: skip


def test_registered_names_run_as_the_built_in_ones():
    for kind, (factory, _, _) in KINDS.items():
        assert register(kind, "mine")(factory) is factory
    given = SMALL | {"engine": "reference"}
    equal(*(simulate(**given | {kind: entry[k] for kind, entry in KINDS.items()}) for k in (1, 2)))


def anchored(model, *, optimizer, batch_size, pull: Traced = 0.1):
    return local_training(model, optimizer=optimizer, batch_size=batch_size, proximal=pull)


def test_a_traced_option_of_a_registered_client_is_that_of_the_spec_or_of_the_preset():
    """Such an option once kept its default: it was left out of the numbers of the run."""
    register("client", "mine")(anchored)
    register("method", "mine", timing="every", client=Spec(anchored, pull=0.5))(server.fedasync)
    given = SMALL | {"steps": 3, "lr": 0.3, "engine": "reference"}
    usual, other = (simulate(**given, method=f"fedasync:proximal={weight}") for weight in (0.5, 0.9))
    equal(simulate(**given, client="mine:pull=0.5"), usual)
    equal(simulate(**given, method="mine"), usual)
    equal(simulate(**given, method="mine:pull=0.9"), other)
    one, two = (run.params["output"]["kernel"] for run in (usual, other))
    assert method_options("mine")["pull"] == 0.5 and np.abs(one - two).max() > 1e-4


def scaled(*, server_lr: Traced = 1.0):
    return server.fedbuff(server_lr=2 * server_lr)


def constant(*, mean: float = 1.0):
    return DELAYS["constant"](mean=mean)


def narrow(*, num_classes, input_shape, width: int = 4):
    return 1


@pytest.mark.parametrize(("kind", "factory", "option", "says"), [
    ("method", scaled, "server_lr=abc", "server_lr = 'abc': must be a n"),
    ("delay", constant, "mean=abc", "mean = 'abc': must be a number"),
    ("model", narrow, "width=6.5", "width = 6.5: must be a whole number"),
])  # fmt: skip
def test_a_value_of_another_kind_than_its_option_is_refused(kind, factory, option, says):
    register(kind, "mine")(factory)
    assert refusal(simulate, **SMALL | {kind: f"mine:{option}"}).startswith(f"{kind} = 'mine:{option}': {says}")


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_records_the_code_of_a_registered_name(kind):
    factory, spec, _ = KINDS[kind]
    register(kind, "mine")(factory)
    recorded = as_dict(Settings(**SMALL | {kind: spec}))
    assert (recorded[kind], recorded["own"]) == (spec, {kind: {"mine": registry.ADDED[kind]["mine"].fingerprint}})
    with pytest.raises(ValueError, match=rf"{kind} = 'mint': unknown; did you mean 'mine'.*needs --plugin FILE.py"):
        registry.find(kind, registries.REGISTRIES[kind], "mint")


def test_a_name_that_may_be_a_plugins_says_how_to_load_it():
    assert set(registries.REGISTRIES) == registry.OF_PLUGINS
    advice = "; one of your own needs --plugin FILE.py, in Python register"
    for settings in ({"method": "nothing_like_it"}, {"delay": "rpj"}, {"partition": "abc"}, {"method": "fedbuff+swaa"}):
        assert refusal(simulate, **SMALL | settings).endswith(advice)
    assert refusal(simulate, **SMALL, engine="wavs").endswith("engine = 'wavs': must be one of waves, reference")
    register("client", "mine")(anchored)
    wrong = {"mine:pul=1": "client mine = 'pul': unknown; did you mean 'pull'", "other": "client = 'other': unknown"}
    for client, says in wrong.items():
        assert says in refusal(simulate, client=client, **SMALL)


def test_names_stand_in_the_clock_and_the_data_room_too():
    for kind in ("delay", "partition"):
        register(kind, "mine")(KINDS[kind][0])
    given = {"num_clients": 3, "local_steps": 1, "until": Until(updates=9)}
    np.testing.assert_array_equal(*(plan("every", delay, **given).time for delay in ("mine", "lognormal")))
    assert len(federate(fashion_mnist_6k(), "mine:a=2", 3).size) == 3


def test_a_preset_says_what_a_method_brings():
    register("method", "mine", timing="buffer:size=2", compress="sign", feedback="off", proximal=0.1)(rule)
    experiment = prepare(Settings(method="mine", **SMALL))
    assert experiment.described["compress"] == "sign" and experiment.schedule.closes.tolist() == [False, True] * 3


def test_a_sweep_over_an_option_shares_one_program():
    register("method", "mine", timing="buffer:size=3")(rule)
    points = expand(SMALL | {"method": "mine"}, {"method.server_lr": [0.5, 1.0]})
    assert [point.name for point in points] == ["server_lr=0.5", "server_lr=1.0"]
    settings = [point.settings for point in points]
    assert len(plan_groups(settings)) == 1
    assert [prepare(one).components.hyper["server.server_lr"] for one in settings] == [0.5, 1.0]
    is_refused("mine has no option 'lrr'", expand, SMALL | {"method": "mine"}, {"method.lrr": [0.5]})


def nothing_from(kind, name, preset, factory):
    try:
        register(kind, name, **preset)(factory)
    finally:
        assert not any(registry.ADDED.values())


test_what_cannot_be_registered = refusals(
    ("metod", "mine", {}, rule, "kind = 'metod': unknown; did you mean 'method'"),
    ("method", "fedavg", {}, rule, "name of a method = 'fedavg': must be another name: the package has this one"),
    ("method", "Mine", {}, rule, "name of a method = 'Mine': must be lower-case letters, digits and _"),
    ("method", "a:b", {}, rule, "name of a method = 'a:b'"),
    ("faults", "mine2", {}, rule, "name of a faults = 'mine2': must be lower-case letters and _"),
    ("metrics", "loss", {}, rule, "metrics = 'loss': must be another name"),
    ("metrics", "own_loss", {}, rule, "metrics = 'own_loss': must be another name"),
    ("method", "mine", {}, 5, "method mine = 5: must be a factory"),
    ("method", "mine", {}, lambda a: a, r"method mine = \['a'\]: must be .*, as in def mine\(\*, option=1\)"),
    ("client", "mine", {}, rule, r"client mine = \[\]: must be .*, as in def mine\(model, \*, option=1\)"),
    ("method", "mine", {}, lambda *, x=HIDDEN: x, "fingerprint of .*default of x = <list_iterator"),
    ("method", "mine", {"timming": "every"}, rule, "preset = 'timming': unknown; did you mean 'timing'"),
    ("delay", "mine", {"timing": "every"}, rule, r"preset = \['timing'\]: must be left out unless a method is reg"),
    ("method", "mine", {"timing": "evry"}, rule, "timing = 'evry': unknown; did you mean 'every'"),
    ("method", "mine", {"timing": 3}, rule, "preset.timing = 3: must be a text"),
    ("method", "mine", {"policy": "ort"}, rule, "policy = 'ort': unknown; did you mean 'oort'"),
    ("method", "mine", {"policy": 3}, rule, "preset.policy = 3: must be a text, a name of clock.POLICIES"),
    ("method", "mine", {"proximal": "a"}, rule, "preset.proximal = 'a': must be a finite number >= 0"),
    ("method", "mine", {"compress": "topkk"}, rule, "compress = 'topkk': unknown; did you mean 'topk'"),
    ("method", "mine", {"feedback": "x"}, rule, "preset.feedback = 'x': must be one of off, ef, ef21"),
    ("method", "mine", {"optimizer": "sgdd"}, rule, "optimizer = 'sgdd': unknown; did you mean 'sgd'"),
    ("method", "mine", {"lr": -1}, rule, "preset.lr = -1: must be a finite number > 0"),
    ("method", "mine", {"client": 3}, rule, "preset.client = '3': must be a factory of a ClientAlgorithm"),
    ("method", "mine", {"client": lambda a, b: a}, rule, r"preset.client = '<lambda>\(a, b\)': must be f\(model, \*"),
    by=nothing_from,
)


def test_a_name_means_one_code_in_settings_and_files_unless_it_is_replaced():
    def made(factor):
        def scaled(*, server_lr: float = 1.0):
            return server.fedbuff(server_lr=factor * server_lr)

        return scaled

    register("method", "mine")(made(1.0))
    content = as_dict(Settings(method="mine:server_lr=2", **SMALL))
    register("method", "mine")(made(1.0))  # the same code again
    with pytest.raises(ValueError, match="name of a method = 'mine': must be registered once, but it was with other"):
        register("method", "mine")(made(0.5))
    assert as_dict(Settings(method="mine:server_lr=2", **SMALL)) == as_dict(from_dict(content)) == content
    registry.ADDED.clear()
    alone = from_dict(content)
    assert as_dict(alone) == content
    is_refused(r"method = 'mine:server_lr=2': is a part of your own; .* load the plugin", prepare, alone)
    register("method", "mine", replace=True)(made(0.5))
    assert as_dict(Settings(method="mine:server_lr=2", **SMALL))["own"] != content["own"]
    is_refused("method = 'mine': must be the code that the run began with, but it has chang", from_dict, content)


def wide(width):
    return lambda *, num_classes, input_shape: mlp(num_classes=num_classes, input_shape=input_shape, width=width)


def first(count):
    return lambda: fashion_mnist_6k()._replace(x=fashion_mnist_6k().x[:count], y=fashion_mnist_6k().y[:count])


# kind -> two factories, and what differs in the prepared runs
REPLACED = {
    "model": ([wide(3), wide(4)], lambda run: jax.tree.map(np.shape, run.params)),
    "dataset": ([first(99), first(100)], lambda run: len(run.components.data.y)),
    "compress": ([lambda *, r=r: COMPRESSORS["topk"](ratio=r) for r in (0.1, 0.2)], lambda run: run.traffic.up),
    "optimizer": ([lambda lr, *, m=m: optax.sgd(lr, m) for m in (0.5, 0.9)], lambda run: run.components.client),
    "timing": ([lambda *, n=n: TIMINGS["buffer"](size=n) for n in (1, 2)], lambda run: run.schedule.closes.tolist()),
}  # fmt: skip


@pytest.mark.parametrize("kind", REPLACED)
def test_every_cache_forgets_a_name_that_is_replaced(kind):
    factories, seen = REPLACED[kind]
    found = []
    for factory in factories:
        register(kind, "mine", replace=True)(factory)
        found.append(seen(prepare(Settings(**SMALL | {"timing": "buffer:size=3", "method": "fedbuff", kind: "mine"}))))
    assert found[0] != found[1]


def test_the_schedule_of_a_registered_timing_is_checked():
    def late(scenario):
        schedule = TIMINGS["every"]()(scenario)
        return schedule._replace(version=schedule.version + 1)

    register("timing", "mine")(lambda: late)
    says = "schedule.version[0] = 1: must be the count of steps closed before"
    assert says in refusal(prepare, Settings(**SMALL | {"timing": "mine", "method": "fedbuff"}))


PLUGIN = """
from fedjax_async import register, server
import helper_of_mine

@register("method", "mine")
def mine(*, server_lr: float = 1.0):
    "From a file."
    return server.fedbuff(server_lr=helper_of_mine.FACTOR * server_lr)
"""


def write(folder, factor=1.0):
    folder.mkdir(exist_ok=True)
    (folder / "helper_of_mine.py").write_text(f"FACTOR = {factor}")
    (folder / "own_rules.py").write_text(PLUGIN)
    return folder / "own_rules.py"


def test_a_file_registers_its_parts_once(tmp_path, monkeypatch):
    before, found = list(sys.path), []
    for folder, factor in (("one", 1.0), ("other", 2.0)):
        monkeypatch.delitem(sys.modules, "helper_of_mine", raising=False)
        path = write(tmp_path / folder, factor)
        plugins.load([str(path)])
        plugins.load([str(path)])  # the second time nothing happens
        assert sys.path == before
        assert factories.summary(registry.ADDED["method"]["mine"].entry.rule) == "From a file."
        found.append(registry.ADDED["method"]["mine"].fingerprint)
        registry.ADDED.clear()
    assert found[0] != found[1], "the helper counts, too"


def test_a_file_that_was_edited_within_a_second_runs_as_it_is_now(tmp_path, monkeypatch):
    """Python would run what it compiled of the old text, whose time in seconds and length are the same."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path, factors = tmp_path / "own_rules.py", []
    for factor in ("1.0", "2.0"):
        path.write_text(PLUGIN.replace("import helper_of_mine", "").replace("helper_of_mine.FACTOR", factor))
        os.utime(path, (1e9, 1e9))
        plugins.load([str(path)])
        factors.append(registry.ADDED["method"]["mine"].fingerprint)
        registry.ADDED.clear()
    assert factors[0] != factors[1] and not (tmp_path / "__pycache__").exists()


def test_modules_and_entry_points_are_plugins_too(tmp_path, monkeypatch):
    write(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("own_rules", "helper_of_mine"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    plugins.load(["own_rules"])
    assert "mine" in registry.ADDED["method"]

    class Point:
        value = "some.module:function"

        def load(self):
            return lambda: register("method", "installed")(rule)

    points = {plugins.ENTRY_POINTS: [Point()]}
    monkeypatch.setattr(plugins.metadata, "entry_points", lambda group: points.get(group, []))
    plugins.load_installed()
    assert "installed" in registry.ADDED["method"]


@pytest.mark.parametrize(("content", "message"), [
    (None, "there is no such file"),
    ("import a_module_that_is_not_there", "must be a Python file or module that can be imported; No module named"),
    ("1 / 0", "must run without an error; ZeroDivisionError: division by zero"),
    ("def (", "must run without an error; SyntaxError"),
    ("raise SystemExit(3)", "must run without an error; SystemExit: 3"),
])  # fmt: skip
def test_a_plugin_that_cannot_be_used_is_named(tmp_path, content, message):
    path = tmp_path / "broken.py"
    if content is not None:
        path.write_text(content)
    is_refused(f"plugin = '.*broken.py': .*{message}", plugins.load, [str(path)])
    is_refused(r"plugin = 'no.such.module': must be a Python file or module", plugins.load, ["no.such.module"])


@pytest.mark.parametrize("field", ["method", "delay", "model"])
def test_a_factory_that_raises_is_named(field):
    register(field, "broken")(lambda *, limit=1: {}["inside"])
    with pytest.raises(ValueError, match=rf"^{field}\w* = 'broken.*': its factory raised KeyError: 'inside'$"):
        simulate(**{"model": "logistic", "clients": 4, "updates": 4, field: "broken"})


def test_a_plugin_registers_something(tmp_path, monkeypatch):
    (tmp_path / "an_empty_folder").mkdir()
    (tmp_path / "says_nothing.py").write_text("x = 1")
    monkeypatch.syspath_prepend(tmp_path)
    for source in ("an_empty_folder", str(tmp_path / "says_nothing.py")) * 2:
        is_refused(f"plugin = '{source}': must be .* but it registers nothing", plugins.load, [source])
    assert not plugins.LOADED
    file = tmp_path / "says_nothing.py"
    file.write_text(PLUGIN.replace("import helper_of_mine", "").replace("helper_of_mine.", ""))
    plugins.load([str(file)])  # it registers something now
    assert [str(file)] == [*plugins.LOADED]


def test_a_plugin_that_moved_is_given_again(tmp_path, monkeypatch):
    """The folder has the old path; the same code from another path is accepted, other code is not."""
    old, new = tmp_path / "old", tmp_path / "new"
    path = write(old)
    monkeypatch.delitem(sys.modules, "helper_of_mine", raising=False)
    plugins.load([str(path)])
    checkpoints = tmp_path / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    save_plugins(checkpoints)
    old.rename(new)
    registry.ADDED.clear()
    monkeypatch.setattr(plugins, "LOADED", {})
    with pytest.raises(ValueError, match=r"plugin = '.*own_rules.py': .* no such file any more; if it has moved: --pl"):
        load_plugins(tmp_path / "run")
    plugins.load([str(new / "own_rules.py")])
    load_plugins(tmp_path / "run")
    assert [str(new / "own_rules.py")] == [*plugins.LOADED]


def test_a_plugins_digest_is_of_the_code_that_was_loaded(tmp_path, monkeypatch):
    """Its file may be edited while a run trains; two plugins may have one name."""
    path = write(tmp_path / "one")
    monkeypatch.delitem(sys.modules, "helper_of_mine", raising=False)
    plugins.load([str(path)])
    loaded, changed = plugins.digests(), len(inputs.changed)
    assert list(loaded) == ["own_rules.py"]
    path.write_text(path.read_text() + "\n# edited\n")
    assert plugins.digests() == loaded and len(inputs.changed) == changed
    other = tmp_path / "two" / "own_rules.py"
    other.parent.mkdir()
    other.write_text("import fedjax_async\n\n@fedjax_async.register('delay', 'idle')\ndef idle():\n    return None\n")
    plugins.load([str(other)])
    assert list(plugins.digests()) == ["own_rules.py"] and plugins.digests() != loaded
