"""Factories registered by the user, of nodes too: their names work like built-in ones; files that register them."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_async import Method, Settings, Spec, models, register, server, simulate
from fedjax_async.base import factories, inputs, registry
from fedjax_async.clock import AVAILABILITY, DELAYS, FAULTS, NETWORKS, TIMINGS, Until, plan
from fedjax_async.compress import COMPRESSORS
from fedjax_async.config import method_options, plan_groups, plugins, prepare, registries
from fedjax_async.config.grid import expand
from fedjax_async.config.resolving import with_objects
from fedjax_async.config.settings import as_dict, from_dict
from fedjax_async.data import PARTITIONERS, federate
from fedjax_async.data.embedded import fashion_mnist_6k
from fedjax_async.local import local_training
from fedjax_async.peers import choco, full_models
from fedjax_async.results.begun import load_plugins, save_plugins
from fedjax_async.types import Traced
from tests.told import refusal, same

ROOT = Path(__file__).resolve().parent.parent.parent
HIDDEN = iter([1])
SMALL = {"model": "logistic", "clients": 4, "steps": 1, "updates": 6, "eval_updates": 6}
pytestmark = pytest.mark.usefixtures("nothing_stays_registered")


def equal(one, other):
    same((one.params, one.schedule.time), (other.params, other.schedule.time))


def rule(*, server_lr: Traced = 1.0):
    """A rule with a server learning rate."""
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
    assert method_options("mine")["pull"] == 0.5 and np.abs(kernel(usual) - kernel(other)).max() > 1e-4


def kernel(run):
    return run.params["output"]["kernel"]


@pytest.mark.parametrize(("kind", "factory", "option", "says"), [
    ("method", lambda *, server_lr=1.0: server.fedbuff(server_lr=2 * server_lr), "server_lr=abc", "'abc': must be a n"),
    ("delay", lambda *, mean=1.0: DELAYS["constant"](mean=mean), "mean=abc", "'abc': must be a number"),
    ("model", lambda *, num_classes, input_shape, width=4: 1, "width=6.5", "6.5: must be a whole number"),
])  # fmt: skip
def test_a_value_of_another_kind_than_its_option_is_refused(kind, factory, option, says):
    name = option.partition("=")[0]
    factory.__annotations__[name] = {"server_lr": Traced, "mean": float, "width": int}[name]
    register(kind, "mine")(factory)
    said = refusal(simulate, **SMALL | {kind: f"mine:{option}"})
    assert said.startswith(f"{kind} = 'mine:{option}': {name} = {says}")


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
    advice = "; one of your own needs --plugin FILE.py, in Python register$"
    for settings in ({"method": "nothing_like_it"}, {"delay": "rpj"}, {"partition": "abc"}, {"method": "fedbuff+swaa"}):
        with pytest.raises(ValueError, match=advice):
            simulate(**SMALL | settings)
    with pytest.raises(ValueError, match=r"engine = 'wavs': must be one of waves, reference$"):
        simulate(**SMALL, engine="wavs")


def test_a_client_has_a_setting_of_its_own_that_is_checked():
    register("client", "mine")(anchored)
    with pytest.raises(ValueError, match=r"option of client mine = 'pul': unknown; did you mean 'pull'"):
        simulate(client="mine:pul=0.5", **SMALL)
    with pytest.raises(ValueError, match="client = 'other': unknown"):
        simulate(client="other", **SMALL)


def test_names_stand_in_the_clock_and_the_data_room_too():
    register("delay", "mine")(KINDS["delay"][0])
    register("partition", "mine")(KINDS["partition"][0])
    own, builtin = (
        plan("every", d, num_clients=3, local_steps=1, until=Until(updates=9)) for d in ("mine", "lognormal")
    )
    np.testing.assert_array_equal(own.time, builtin.time)
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
    with pytest.raises(ValueError, match="mine has no option 'lrr'"):
        expand(SMALL | {"method": "mine"}, {"method.lrr": [0.5]})


@pytest.mark.parametrize(("kind", "name", "preset", "factory", "message"), [
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
])  # fmt: skip
def test_what_cannot_be_registered(kind, name, preset, factory, message):
    with pytest.raises(ValueError, match=message):
        register(kind, name, **preset)(factory)
    assert not any(registry.ADDED.values())


def test_a_name_means_one_code_unless_it_is_replaced():
    def made(factor):
        def scaled(*, server_lr: float = 1.0):
            return server.fedbuff(server_lr=factor * server_lr)

        return scaled

    register("method", "mine")(made(1.0))
    own = as_dict(Settings(method="mine", **SMALL))["own"]
    register("method", "mine")(made(1.0))  # the same code again
    with pytest.raises(ValueError, match="name of a method = 'mine': must be registered once, but it was with other"):
        register("method", "mine")(made(0.5))
    assert as_dict(Settings(method="mine", **SMALL))["own"] == own
    register("method", "mine", replace=True)(made(0.5))
    assert as_dict(Settings(method="mine", **SMALL))["own"] != own


def wide(width):
    return lambda *, num_classes, input_shape: mlp(num_classes=num_classes, input_shape=input_shape, width=width)


def first(count):
    whole = fashion_mnist_6k()
    return lambda: whole._replace(x=whole.x[:count], y=whole.y[:count])


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
    every = TIMINGS["every"]()

    def late(scenario):
        schedule = every(scenario)
        return schedule._replace(version=schedule.version + 1)

    register("timing", "mine")(lambda: late)
    with pytest.raises(ValueError, match=r"schedule.version\[0\] = 1: must be the count of steps closed before"):
        prepare(Settings(**SMALL | {"timing": "mine", "method": "fedbuff"}))


def test_settings_from_a_file_need_the_same_code():
    register("method", "mine")(rule)
    content = as_dict(Settings(method="mine:server_lr=2", **SMALL))
    assert as_dict(from_dict(content)) == content
    registry.ADDED.clear()
    alone = from_dict(content)
    assert as_dict(alone) == content
    with pytest.raises(ValueError, match=r"method = 'mine:server_lr=2': is a part of your own; .* load the plugin"):
        prepare(alone)
    register("method", "mine")(lambda *, server_lr=1.0: server.fedbuff(server_lr=-server_lr))
    with pytest.raises(ValueError, match="method = 'mine': must be the code that the run began with, but it has chang"):
        from_dict(content)


# --- plugins ----------------------------------------------------------------------------------------

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
            return a_function_that_registers

    monkeypatch.setattr(
        plugins.metadata, "entry_points", lambda group: [Point()] if group == plugins.ENTRY_POINTS else []
    )
    plugins.load_installed()
    assert "installed" in registry.ADDED["method"]


def a_function_that_registers():
    register("method", "installed")(rule)


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
    with pytest.raises(ValueError, match=f"plugin = '.*broken.py': .*{message}"):
        plugins.load([str(path)])
    with pytest.raises(ValueError, match=r"plugin = 'no.such.module': must be a Python file or module"):
        plugins.load(["no.such.module"])


@pytest.mark.parametrize("field", ["method", "delay", "model"])
def test_a_factory_that_raises_is_named(field):
    @register(field, "broken")
    def broken(*, limit: int = 1):
        return {}["inside"]

    with pytest.raises(ValueError, match=rf"^{field}\w* = 'broken.*': its factory raised KeyError: 'inside'$"):
        simulate(**{"model": "logistic", "clients": 4, "updates": 4, field: "broken"})


def test_a_plugin_registers_something(tmp_path, monkeypatch):
    (tmp_path / "an_empty_folder").mkdir()
    (tmp_path / "says_nothing.py").write_text("x = 1")
    monkeypatch.syspath_prepend(tmp_path)
    for source in ("an_empty_folder", str(tmp_path / "says_nothing.py")) * 2:
        with pytest.raises(ValueError, match=f"plugin = '{source}': must be .* but it registers nothing"):
            plugins.load([source])
    assert not plugins.LOADED
    (tmp_path / "says_nothing.py").write_text(
        PLUGIN.replace("import helper_of_mine", "").replace("helper_of_mine.", "")
    )
    plugins.load([str(tmp_path / "says_nothing.py")])  # it registers something now
    assert [str(tmp_path / "says_nothing.py")] == [*plugins.LOADED]


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


# --- nodes of one's own, checked against the contract; nothing is compiled ------------------------

WORLD = {"dataset": "synthetic", "model": "logistic", "clients": 4, "steps": 1, "batch_size": 8, "updates": 6}


def test_a_factory_that_takes_stays_is_a_method_without_a_server():
    @register("method", "mine", exchange="mean", topology="ring", lr=0.1)
    def mine(stays, *, step: Traced = 0.5):
        """Nodes with their inbox scaled by ``step``."""
        plain = full_models(stays)

        def wake(row, inbox, event):
            return plain.wake(row, jax.tree.map(lambda leaf: step * leaf, inbox), event)

        return plain._replace(wake=wake)

    found = prepare(Settings(**WORLD, method="mine:step=0.3"))
    usual = prepare(Settings(**WORLD, method="async_dfedavg", topology="ring"))
    np.testing.assert_array_equal(found.schedule.weight, usual.schedule.weight)
    assert found.schedule.message_bytes == usual.schedule.message_bytes > 0
    assert found.components.hyper["peer.step"] == 0.3
    assert (found.settings.topology, found.settings.lr, found.settings.optimizer) == ("ring", 0.1, "sgd")


def test_a_factory_that_takes_a_compressor_gets_the_one_of_the_run():
    register("method", "mine", exchange="dpsgd", topology="ring", compress="topk:ratio=0.1")(choco)
    one, other = (prepare(Settings(**WORLD, method="mine", compress=c)) for c in (None, "topk:ratio=0.5"))
    assert one.settings.compress == "topk:ratio=0.1"
    assert other.schedule.message_bytes > 2 * one.schedule.message_bytes


@pytest.mark.parametrize(("preset", "factory", "message"), [
    ({"timing": "every"}, lambda stays: 1, "preset.timing = 'every': must be left out of a method without a serv"),
    ({"policy": "oort"}, lambda stays: 1, "preset.policy = 'oort': must be left out of a method without a server"),
    ({"topology": "ring"}, lambda *, x=1: x, "preset.topology = 'ring': must be left out of a method with a serv"),
    ({"exchange": "mea"}, lambda stays: 1, "exchange = 'mea': unknown; did you mean 'mean'"),
    ({"topology": 3}, lambda stays: 1, "preset.topology = 3: must be a text, a name of peers.TOPOLOGIES"),
    ({"compress": "sign"}, lambda stays: 1, "preset.compress = 'sign': must be left out: it takes none"),
    ({}, lambda stays, compressor: 1, "preset.compress = None: must be a compressor such as"),
    ({}, lambda nodes: 1, r"method mine = \['nodes'\]: must be .*, or without a server def mine\(stays, \*"),
    ({}, lambda stays: 1, r"method mine = '1': must be a factory of a PeerAlgorithm"),
    ({}, lambda stays: {}["inside"], r"method = 'mine': its factory raised KeyError: 'inside'"),
    ({}, lambda *, x=1: full_models(bool), r"must be a factory of a ServerAlgorithm .*: def mine\(stays, \*, ...\)"),
])  # fmt: skip
def test_nodes_that_cannot_be_registered_or_used(preset, factory, message):
    with pytest.raises(ValueError, match=message):
        register("method", "mine", **preset)(factory)
        prepare(Settings(**WORLD, method="mine"))


def one_message(row):
    return jax.tree.map(lambda leaf: leaf[None], row)


@pytest.mark.parametrize(("field", "function", "message"), [
    (None, Spec(lambda: full_models(bool)), r"must return a ServerAlgorithm \(of nodes"),
    (None, full_models(bool), r"'a PeerAlgorithm': .* wrap the algorithm: Method\("),
    ("init", lambda params: params[0], r"peer.init: must be a function init\(params\) -> row; it raised KeyError"),
    ("wake", lambda row, inbox, event: {"a": 1},
     r"peer.wake returned .*: must return a row of the structure .*peer.init"),
    ("wake", lambda row, inbox: row,
     r"peer.wake: must be a function wake\(row, inbox, event\) -> row; it raised TypeError"),
    ("add", lambda inbox, row, message, weight: weight, "peer.add returned .*: must return an inbox of the struct"),
    ("add", lambda inbox, row, message, weight: message["no"], r"peer.add: must be .* it raised KeyError: 'no'"),
    ("start", lambda row: row, "peer.start returned .*: must return a Message"),
    ("params", lambda row: jnp.zeros(3), "peer.params returned .*: must return params of the structure"),
    ("push", lambda row, upload, event: (row, upload), r"peer.push returned .*: must return \(row, messages, col"),
    ("push", lambda row, upload, event: (row, row, {}), r"peer.push's messages returned .*: .* \[F, ...\], F = 1"),
    ("push", lambda row, upload, event: (row, one_message(row), {"x": "y"}), "peer.push's columns returned"),
])  # fmt: skip
def test_what_nodes_return_is_checked_before_the_run(field, function, message):
    method = Method(lambda stays: full_models(stays)._replace(**{field: function}), exchange="mean")
    method = function if field is None else method
    with pytest.raises(ValueError, match=message):
        prepare(with_objects(Settings(**WORLD, method=method), data=None))


def test_choco_has_a_gamma_of_at_most_one():
    with pytest.raises(ValueError, match="gamma = 2: must be between 0 and 1"):
        choco(bool, None, gamma=2)
