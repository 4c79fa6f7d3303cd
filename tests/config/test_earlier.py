"""Settings that were saved before a method's defaults changed mean what they meant; a small buffer is said."""

from __future__ import annotations

import copy

import pytest

from fedjax_async import Settings
from fedjax_async.base import identity
from fedjax_async.base.notices import RunWarning, SmallBuffer
from fedjax_async.config import prepare
from fedjax_async.config.earlier import CHANGED, Earlier
from fedjax_async.config.methods import method_of
from fedjax_async.config.paths import changed
from fedjax_async.config.settings import as_dict, fields_of, from_dict
from fedjax_async.engine.components import parted
from tests.told import warned

TINY = {"model": "logistic", "steps": 1, "lr": 0.05, "partition": "iid", "delay": "constant"}


def before(method, **given):
    """Settings as the version before the change wrote them: without ``defaults``."""
    content = as_dict(Settings(method=method, updates=6, **given))
    content.pop("defaults", None)
    return content


def meant(settings):
    chosen = method_of(settings.method)
    return parted(chosen.rule)[1]["server.server_lr"], settings.timing or chosen.timing


OLD = {
    "fedbuff": (1.0, "buffer:size=3"), "ca2fl": (1.0, "buffer:size=3"), "fadas": (0.01, "buffer:size=3"),
    "fedbuff:server_lr=0.5": (0.5, "buffer:size=3"), "fedbuff:exponent=0.3": (1.0, "buffer:size=3"),
    "fedbuff@buffer:size=6": (1.0, "buffer:size=6"), "fedbuff:exponent=0.3+swa:start=0.5@every": (1.0, "every"),
    "ca2fl:server_lr=2+swa@buffer:size=4": (2.0, "buffer:size=4"),
}  # fmt: skip


@pytest.mark.parametrize("method", OLD)
def test_a_file_without_defaults_means_the_earlier_ones(method):
    content = before(method)
    found = from_dict(content)
    assert meant(found) == OLD[method]
    assert as_dict(found) == content, "resumed and compared as the same run"
    assert "defaults" not in content and type(as_dict(found)["method"]) is str


def test_the_earlier_adaptation_and_a_setting_of_the_timing_are_kept():
    old = from_dict(before("fadas"))
    stated = "fadas:server_lr=0.01,adaptation=inverse@buffer:size=3"
    assert method_of(old.method) == method_of(stated) != method_of("fadas")
    assert meant(from_dict(before("fedbuff", timing="buffer:size=5"))) == (1.0, "buffer:size=5")


@pytest.mark.parametrize("method", ["fedbuff", "ca2fl:server_lr=2", "fadas@every", "fedbuff+swa"])
def test_todays_settings_keep_the_defaults_that_they_leave_open(method):
    settings = Settings(method=method, updates=6)
    content = as_dict(settings)
    assert from_dict(content) == settings and type(from_dict(content).method) is str
    left = set(content["defaults"])
    assert left <= {*CHANGED[method.partition("@")[0].partition(":")[0].partition("+")[0]]}
    assert ("timing" in left) == ("@" not in method) and ("server_lr" in left) == ("server_lr" not in method)


@pytest.mark.parametrize(
    "method", ["fedavg", "fedasync", "fedbuff:server_lr=1@buffer:size=3", "ca2fl:server_lr=1@every"]
)
def test_settings_that_leave_no_changed_default_open_are_saved_as_before(method):
    assert "defaults" not in as_dict(Settings(method=method, updates=6))
    assert from_dict(before(method)) == Settings(method=method, updates=6)


def test_a_files_own_defaults_hold_whatever_todays_are():
    content = {**before("fedbuff"), "defaults": {"server_lr": 0.2, "timing": "buffer:size=7"}}
    found = from_dict(content)
    assert meant(found) == (0.2, "buffer:size=7") and as_dict(found) == content


def test_an_earlier_method_is_equal_to_no_other_text_and_a_changed_option_keeps_its_defaults():
    old = from_dict(before("fedbuff"))
    assert old.method != "fedbuff" and "fedbuff" != old.method  # noqa: SIM300 (both directions)
    assert isinstance(old.method, Earlier) and old.method == from_dict(before("fedbuff")).method
    assert method_of(old.method) != method_of("fedbuff"), "no cache confuses them"
    found = changed(fields_of(old), {"method.exponent": 0.3})["method"]
    assert found == "fedbuff:server_lr=1.0,exponent=0.3@buffer:size=3"


DEFAULTS = {
    "fedbuff": ({"server_lr": 0.7}, "buffer:size=10"), "ca2fl": ({"server_lr": 0.3}, "buffer:size=10"),
    "fadas": ({"server_lr": 0.001, "b1": 0.9, "b2": 0.99, "eps": 1e-8, "tolerated": 1.0}, "buffer:size=5"),
}  # fmt: skip


@pytest.mark.parametrize("method", DEFAULTS)
def test_the_defaults_are_fixed_and_those_of_the_docstring(method):
    numbers, timing = DEFAULTS[method]
    chosen = method_of(method)
    found = {name.removeprefix("server."): value for name, value in parted(chosen.rule)[1].items()}
    assert (found, chosen.timing) == (numbers, timing)
    with pytest.raises(ValueError, match=r"at most the 4 clients in flight .*METHOD@buffer:size=4"):
        prepare(Settings(method=method, clients=4, updates=6, **TINY))


# --- small buffers ------------------------------------------------------------------------------------


def said_of(method, *, clients=30, **given):
    settings = Settings(method=method, clients=clients, updates=40, **TINY | given)
    return warned(prepare, settings, kind=SmallBuffer)[1]


@pytest.mark.parametrize(("method", "given"), [
    ("fedbuff@buffer:size=3", {}), ("fedavg", {"timing": "buffer:size=3"}),
    ("fedmedian:size=3@buffer:size=3,concurrency=31", {"clients": 40}),
])  # fmt: skip
def test_a_buffer_under_a_tenth_of_the_jobs_in_flight_is_said_in_one_line(method, given):
    (text,) = said_of(method, **{"clients": 31} | given)
    assert text.startswith(f"{method}: its buffer of 3 is under a tenth of the 31 jobs in flight: uploads are about 10")
    assert "\n" not in text and "@buffer:size=4)" in text and issubclass(SmallBuffer, RunWarning)


@pytest.mark.parametrize(
    "method",
    ["fedbuff@buffer:size=3", "fedbuff@buffer:size=1,concurrency=10", "fedasync", "fedavg", "asynfl@window:length=2"],
)
def test_other_timings_and_buffers_of_a_tenth_are_not_warned_of(method):
    assert said_of(method) == []


def test_a_policy_that_decides_the_buffer_is_not_warned_of():
    assert said_of("fedbuff@buffer:size=3,concurrency=31", clients=40, policy="adaptive_buffer:size=3,most=6") == []


def test_earlier_methods_can_be_copied():
    found = from_dict(before("fedbuff"))
    for again in (copy.copy(found.method), copy.deepcopy(found).method):
        assert again == found.method and again.meaning == found.method.meaning and again.kept is None


def test_settings_that_are_gone_and_changed_no_result_are_left_out_of_older_files():
    now = as_dict(Settings(method="asgd", updates=6))
    older = now | {"fixed_steps": True, "waves_per_call": 4}
    with pytest.warns(RunWarning, match="^fixed_steps and waves_per_call of an earlier version: left out"):
        assert from_dict(older) == Settings(method="asgd", updates=6)
    assert identity.difference(older, now) == ""
