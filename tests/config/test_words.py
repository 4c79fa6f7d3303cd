"""Texts of settings: names with options, read and written; what messages say of names that are unknown."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedjax_async.base import check, factories, grammar, registry
from fedjax_async.clock import TIMINGS
from fedjax_async.config import METHODS, Settings, misplaced, words
from fedjax_async.config.methods import method, method_options, usual_of
from fedjax_async.config.names import JOINED, names_in, read
from fedjax_async.config.registries import REGISTRIES
from fedjax_async.peers import EXCHANGES
from tests.refusals import refusals
from tests.told import refusal

WORDS = st.sampled_from(["a", "b_c", "long_name"])
VALUES = st.one_of(
    st.integers(), st.floats(allow_nan=False), st.booleans(), st.none(), st.sampled_from(["x,y", "+z", "p"])
)
OPTIONS = st.dictionaries(WORDS, VALUES, max_size=3)
PARTS = st.lists(st.tuples(st.sampled_from(["drop", "late", "swa", "dominance"]), OPTIONS), min_size=1, max_size=3)


def made(name, options):
    return grammar.Name(name, {option: grammar.option_text(option, value) for option, value in options.items()})


@given(st.sampled_from([*JOINED, "metrics"]), PARTS)
def test_a_written_text_is_read_back(field, parts):
    names = [made(*part) for part in parts]
    text = ("," if field == "metrics" else "+").join(map(str, names))
    found = read(field, text)
    assert (str(found), list(found.parts), found.clock) == (text, names, None)
    assert [part.options for part in found.parts] == [options for _, options in parts]


@given(OPTIONS, PARTS, st.none() | OPTIONS)
def test_a_methods_text_has_a_rule_parts_and_a_clock(rule, parts, clock):
    parts = [("swa" if name in ("drop", "late") else name, options) for name, options in parts]
    names = [made("fedbuff", rule), *(made(*part) for part in parts)]
    text = "+".join(map(str, names)) + ("" if clock is None else f"@{made('buffer', clock)}")
    found = read("method", text)
    assert str(found) == text and list(found.parts) == names
    assert found.clock == (None if clock is None else made("buffer", clock))
    own = [] if clock is None else ["@buffer"]
    assert names_in("method", text) == ["fedbuff", *(f"+{name}" for name, _ in parts), *own]


def test_one_name_is_put_in_the_place_of_another():
    names = read("faults", "drop:probability=0.1+late:extra=30")
    changed = names.put(1, names.parts[1].put("extra", "9").put("share", "0.5"))
    assert str(changed) == "drop:probability=0.1+late:extra=9,share=0.5"
    assert str(changed.put(0, changed.parts[0].without(["probability"]))) == "drop+late:extra=9,share=0.5"


test_a_value_without_the_name_of_its_option_is_told_it = refusals(
    ("delay", "lognormal:0.5", "^delay = 'lognormal:0.5': options are written .*, as in lognormal:mean=0.5 "),
    ("method", "fedbuff@buffer:5", "^timing = 'buffer:5': options are written .*, as in buffer:size=5 "),
    ("method", "pushcen@divshare:0.1", "^exchange = 'divshare:0.1': options are written .*, as in divshare:omega"),
    ("method", "fedbuff+swa:0.5", "^part = 'swa:0.5': options are written .*, as in swa:start=0.5 "),
    by=read,
)


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


test_options_that_the_rule_does_not_take = refusals(
    ("fedbuff:size=5", "option of fedbuff = 'size': must be an option of the timing, as in fedbuff@buffer:size=5"),
    ("fedbuff:clip=1,size=5+swa:start=0.3", "as in fedbuff:clip=1+swa:start=0.3@buffer:size=5"),
    ("fedbuff:size=5@cohort:over_selection=2", "as in fedbuff@cohort:over_selection=2,size=5"),
    ("fedbuff:start=0.4+swa@every", "an option of the part swa, as in fedbuff+swa:start=0.4@every"),
    ("asynflc_ef:ratio=0.4", "an option of the setting compress, as in compress=topk:ratio=0.4"),
    ("fedasync:momentum=0.9", "an option of the setting optimizer, as in optimizer=sgd:momentum=0.9"),
    ("pushcen:receivers=4", "an option of the setting topology, as in topology=gossip:receivers=4"),
    ("fedasync:size=4", "of the timing buffer or fresh or cohort or midway or polling or hurry, as in fedasync@"),
    ("fedbuff:clip=1,k=10", "fedbuff = 'k': must be an option of the timing, as in fedbuff:clip=1@buffer:size=10"),
    ("fedprox:mu=0.1", "option of fedprox = 'mu': must be called proximal"),
    ("fedasync:alpha=0.6", "option of fedasync = 'alpha': must be called mixing"),
    ("fedbuff:ratio=0.1", "the setting compress, as in compress=topk:ratio=0.1 or compress=topk_fast:ratio"),
    ("dpsgd:one_peer=true", "an option of the setting topology, as in topology=exponential:one_peer=true"),
    ("fedasync:mixin=0.4", "option of fedasync = 'mixin': unknown; did you mean 'mixing'?"),
    by=method,
)


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


def test_near_names_contain_the_word_first_and_what_nothing_takes_has_no_place():
    assert misplaced.elsewhere(read("method", "fedbuff:xyz=1"), usual_of("fedbuff"), "xyz", "1") is None
    assert check.nearest("fraction", Settings.__dataclass_fields__, 2) == ["test_fraction", "validation_fraction"]
    many = {f"name{i}": i for i in range(30)}
    with pytest.raises(ValueError, match=r"the nearest names are .*list` shows all") as error:
        registry.find("thing", many, "zzz")
    assert len(str(error.value)) < 120
