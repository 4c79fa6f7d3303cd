"""Texts of settings: names with options, read and written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedjax_async.base import grammar
from fedjax_async.config.names import JOINED, names_in, read

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


@pytest.mark.parametrize(
    ("field", "text", "says"),
    [
        ("delay", "lognormal:0.5", "delay = 'lognormal:0.5': options are written .*, as in lognormal:mean=0.5 "),
        ("method", "fedbuff@buffer:5", "timing = 'buffer:5': options are written .*, as in buffer:size=5 "),
        ("method", "pushcen@divshare:0.1", "exchange = 'divshare:0.1': options are written .*, as in divshare:omega"),
        ("method", "fedbuff+swa:0.5", "part = 'swa:0.5': options are written .*, as in swa:start=0.5 "),
    ],
)
def test_a_value_without_the_name_of_its_option_is_told_it(field, text, says):
    with pytest.raises(ValueError, match=f"^{says}"):
        read(field, text)
