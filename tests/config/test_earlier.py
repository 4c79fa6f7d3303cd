"""Settings that were saved before a method's defaults changed mean what they meant."""

import copy

import pytest

from fedjax_async import Settings
from fedjax_async.base import identity
from fedjax_async.base.notices import RunWarning
from fedjax_async.config import prepare
from fedjax_async.config.earlier import Earlier
from fedjax_async.config.methods import method_of
from fedjax_async.config.paths import changed
from fedjax_async.config.settings import as_dict, fields_of, from_dict
from fedjax_async.engine.components import parted


def before(method, **given):
    """Settings as the version before the change wrote them: without ``defaults``."""
    content = as_dict(Settings(method=method, updates=6, **given))
    content.pop("defaults", None)
    return content


def meant(settings):
    chosen = method_of(settings.method)
    return parted(chosen.rule)[1]["server.server_lr"], settings.timing or chosen.timing


@pytest.mark.parametrize(("method", "given", "meaning"), [
    ("fedbuff", {}, (1.0, "buffer:size=3")), ("ca2fl", {}, (1.0, "buffer:size=3")),
    ("fadas", {}, (0.01, "buffer:size=3")), ("fedbuff:server_lr=0.5", {}, (0.5, "buffer:size=3")),
    ("fedbuff:exponent=0.3", {}, (1.0, "buffer:size=3")), ("fedbuff@buffer:size=6", {}, (1.0, "buffer:size=6")),
    ("fedbuff:exponent=0.3+swa:start=0.5@every", {}, (1.0, "every")),
    ("ca2fl:server_lr=2+swa@buffer:size=4", {}, (2.0, "buffer:size=4")),
    ("fedbuff", {"timing": "buffer:size=5"}, (1.0, "buffer:size=5")),
    ("fedbuff", {"defaults": {"server_lr": 0.2, "timing": "buffer:size=7"}}, (0.2, "buffer:size=7")),
])  # fmt: skip
def test_a_file_without_defaults_means_the_earlier_ones_and_one_with_them_those(method, given, meaning):
    content = before(method) | given
    found = from_dict(content)
    assert meant(found) == meaning
    assert as_dict(found) == content, "resumed and compared as the same run"
    assert type(as_dict(found)["method"]) is str


@pytest.mark.parametrize(("method", "left"), [
    ("fedbuff", {"server_lr", "timing"}), ("ca2fl:server_lr=2", {"timing"}), ("fedbuff+swa", {"server_lr", "timing"}),
    ("fadas@every", {"server_lr", "adaptation"}),
    *((method, set()) for method in ("fedavg", "fedasync", "fedbuff:server_lr=1@buffer:size=3",
                                     "ca2fl:server_lr=1@every")),
])  # fmt: skip
def test_todays_settings_keep_the_changed_defaults_that_they_leave_open(method, left):
    settings = Settings(method=method, updates=6)
    content = as_dict(settings)
    assert from_dict(content) == settings and type(from_dict(content).method) is str
    assert set(content.get("defaults", ())) == left
    assert left or from_dict(before(method)) == settings


def test_an_earlier_method_is_equal_to_no_other_text_and_a_changed_option_keeps_its_defaults():
    old = from_dict(before("fedbuff"))
    assert old.method != "fedbuff" and "fedbuff" != old.method  # noqa: SIM300 (both directions)
    assert isinstance(old.method, Earlier) and old.method == from_dict(before("fedbuff")).method
    assert method_of(old.method) != method_of("fedbuff"), "no cache confuses them"
    found = changed(fields_of(old), {"method.exponent": 0.3})["method"]
    assert found == "fedbuff:server_lr=1.0,exponent=0.3@buffer:size=3"
    for again in (copy.copy(old.method), copy.deepcopy(old).method):
        assert again == old.method and again.meaning == old.method.meaning and again.kept is None
    adapting = from_dict(before("fadas")).method
    assert method_of(adapting) == method_of("fadas:server_lr=0.01,adaptation=inverse@buffer:size=3")
    assert method_of(adapting) != method_of("fadas")


FADAS = {"server_lr": 0.001, "b1": 0.9, "b2": 0.99, "eps": 1e-8, "tolerated": 1.0}


@pytest.mark.parametrize(("method", "numbers", "timing"), [
    ("fedbuff", {"server_lr": 0.7}, "buffer:size=10"), ("ca2fl", {"server_lr": 0.3}, "buffer:size=10"),
    ("fadas", FADAS, "buffer:size=5"),
])  # fmt: skip
def test_the_defaults_are_fixed_and_those_of_the_docstring(method, numbers, timing):
    chosen = method_of(method)
    found = {name.removeprefix("server."): value for name, value in parted(chosen.rule)[1].items()}
    assert (found, chosen.timing) == (numbers, timing)
    with pytest.raises(ValueError, match=r"at most the 4 clients in flight .*METHOD@buffer:size=4"):
        prepare(Settings(method=method, clients=4, updates=6, model="logistic", steps=1, partition="iid"))


def test_settings_that_are_gone_and_changed_no_result_are_left_out_of_older_files():
    now = as_dict(Settings(method="asgd", updates=6))
    older = now | {"fixed_steps": True, "waves_per_call": 4}
    with pytest.warns(RunWarning, match="^fixed_steps and waves_per_call of an earlier version: left out"):
        assert from_dict(older) == Settings(method="asgd", updates=6)
    assert identity.difference(older, now) == ""
