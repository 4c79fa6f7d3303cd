"""Messages about unknown names: every name that is suggested exists, and options name the part that takes them."""

from __future__ import annotations

import pytest

from fedjax_async.base import check, factories, registry
from fedjax_async.clock import TIMINGS
from fedjax_async.config import METHODS, Settings, misplaced, words
from fedjax_async.config.methods import method, method_options, usual_of
from fedjax_async.config.names import read
from fedjax_async.config.registries import REGISTRIES
from fedjax_async.peers import EXCHANGES
from tests.told import refusal


def clocks():
    """Method, its kind of clock, and each option of the clock that the method itself does not take."""
    for name, preset in METHODS.items():
        kind, known = ("timing", TIMINGS) if preset.has_server else ("exchange", EXCHANGES)
        clock = getattr(preset, kind).partition(":")[0]
        for option in factories.options_of(known[clock]):
            if option not in method_options(name):
                yield name, kind, clock, option


def test_every_option_of_a_methods_clock_is_shown_where_it_belongs():
    found = list(clocks())
    assert ("fedbuff", "timing", "buffer", "size") in found and len(found) > 90
    for name, kind, clock, option in found:
        example = refusal(method, f"{name}:{option}=7").partition(f"must be an option of the {kind}, as in ")[2]
        assert example.startswith(f"{name}@{clock}:")
        assert registry.read(kind, example.partition("@")[2]).options[option] == 7
        assert getattr(method(example), kind) == example.partition("@")[2]  # the example can be used


@pytest.mark.parametrize(("spec", "says"), [
    ("fedbuff:size=5", "option of fedbuff = 'size': must be an option of the timing, as in fedbuff@buffer:size=5"),
    ("fedbuff:clip=1,size=5+swa:start=0.3", "as in fedbuff:clip=1+swa:start=0.3@buffer:size=5"),
    ("fedbuff:size=5@cohort:over_selection=2", "as in fedbuff@cohort:over_selection=2,size=5"),
    ("fedbuff:start=0.4+swa@every", "an option of the part swa, as in fedbuff+swa:start=0.4@every"),
    ("asynflc_ef:ratio=0.4", "an option of the setting compress, as in compress=topk:ratio=0.4"),
    ("fedasync:momentum=0.9", "an option of the setting optimizer, as in optimizer=sgd:momentum=0.9"),
    ("pushcen:receivers=4", "an option of the setting topology, as in topology=gossip:receivers=4"),
    ("fedasync:size=4", "of the timing buffer or fresh or cohort or midway or polling or hurry, as in fedasync@"),
    ("fedbuff:clip=1,k=10",
     "option of fedbuff = 'k': must be an option of the timing, as in fedbuff:clip=1@buffer:size=10"),
    ("fedprox:mu=0.1", "option of fedprox = 'mu': must be called proximal"),
    ("fedasync:alpha=0.6", "option of fedasync = 'alpha': must be called mixing"),
    ("fedbuff:ratio=0.1",
     "an option of the setting compress, as in compress=topk:ratio=0.1 or compress=topk_fast:ratio"),
    ("dpsgd:one_peer=true", "an option of the setting topology, as in topology=exponential:one_peer=true"),
    ("fedasync:mixin=0.4", "option of fedasync = 'mixin': unknown; did you mean 'mixing'?"),
])  # fmt: skip
def test_options_that_the_rule_does_not_take(spec, says):
    assert says in refusal(method, spec)


def test_an_option_that_nothing_takes_has_no_place():
    assert misplaced.elsewhere(read("method", "fedbuff:xyz=1"), usual_of("fedbuff"), "xyz", "1") is None


def test_every_word_of_other_programs_means_something_that_exists():
    """Settings, or flags of the command line; examples are specs whose name and options exist."""
    flags = {"out", "quiet", "overwrite", "stream", "plugin"}
    for meant in words.CALLED:
        setting, equals, spec = meant.partition("=")
        assert setting in Settings.__dataclass_fields__ or setting in flags, meant
        if not equals:
            continue
        (part,) = read(setting, spec).parts
        name = part.name
        known = method_options(name) if setting == "method" else factories.options_of(REGISTRIES[setting][name])
        assert set(part.texts) <= set(known), meant


def test_no_word_of_other_programs_is_a_setting_or_means_two_things():
    options = [word for listed in words.OPTIONS.values() for word in listed.split()]
    assert len(set(options)) == len(options) and not set(options) & set(words.OPTIONS)
    every = [word for listed in words.CALLED.values() for word in listed.split()]
    assert len(set(every)) == len(every) and not set(every) & set(Settings.__dataclass_fields__)
    assert all(word == words.plain(word) for word in every)


def test_near_names_contain_the_word_first():
    assert check.nearest("fraction", Settings.__dataclass_fields__, 2) == ["test_fraction", "validation_fraction"]
    many = {f"name{i}": i for i in range(30)}
    with pytest.raises(ValueError, match=r"the nearest names are .*list` shows all") as error:
        registry.find("thing", many, "zzz")
    assert len(str(error.value)) < 120
