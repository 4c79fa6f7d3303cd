"""Specs: a name with options is parsed, bound, or refused."""

from __future__ import annotations

import functools
import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedjax_async.base import factories, grammar, registry
from fedjax_async.config.registries import REGISTRIES
from tests.told import refusal


def square(*, side=1.0, colour="red"):
    """A square. With a colour.

    More.
    """
    return ("square", side, colour)


def circle(scale, *, radius, centre_x=0, filled=False):
    """A circle."""
    return ("circle", scale, radius, centre_x, filled)


SHAPES = {"square": square, "circle": circle, "none": lambda: None}


def shape(text, **defaults):
    return registry.spec("shape", SHAPES, text, **defaults)


KNOWN, NAMED = " (known: square, circle, none)", " (options: side, colour)"
FORM = "options are written key=value, comma-separated"


@pytest.mark.parametrize(("spec", "message"), [
    ("sqare", "unknown; did you mean 'square'?" + KNOWN),
    ("Circle", "unknown; did you mean 'circle'?" + KNOWN),
    ("cycle", "unknown; did you mean 'circle'?" + KNOWN),
    ("nothing", "unknown" + KNOWN),
    ("", "unknown" + KNOWN),
    # a value without the name of its option is told it
    ("square:side=1,2", FORM + NAMED),
    ("square:3", FORM + ", as in square:side=3" + NAMED),
    ("square:=3", FORM + ", as in square:side=3" + NAMED),
    ("square:red", FORM + ", as in square:colour=red" + NAMED),
    ("square:side=3,red", FORM + ", as in square:side=3,colour=red" + NAMED),
    ("square:side", FORM + ", as in square:side=..." + NAMED),
    ("circle:true", FORM + ", as in circle:filled=true (options: radius, centre_x, filled)"),
    ("none:3", FORM + " (options: none)"),
    ("oval:3", FORM),
    ("square:colour=red,blue", FORM + '; a value that has a comma is quoted: colour="red,blue"'),
    ("oval:path=a,b.csv", FORM + '; a value that has a comma is quoted: path="a,b.csv"'),
    # unknown and missing options
    ("square:sidee=2", "square has no option 'sidee'; did you mean 'side'?" + NAMED),
    ("square:q=2", "square has no option 'q'" + NAMED),
    ("circle:radius=1,scale=2", "circle has no option 'scale' (options: radius, centre_x, filled)"),
    ("none:a=1", "none has no option 'a' (options: none)"),
    ("circle:filled=true", "circle needs the option radius, as in circle:radius=..."),
])  # fmt: skip
def test_what_is_wrong_is_refused_before_anything_runs(spec, message):
    assert refusal(shape, spec) == f"shape = {spec!r}: {message}"
    assert ":" in spec or refusal(registry.find, "shape", SHAPES, spec) == f"shape = {spec!r}: {message}"


READ = {"1e-3": 1e-3, "true": True, "False": False, "inf": float("inf"), "red": "red", "a.csv": "a.csv", "": ""}
READ |= {text: text for text in ("1_0", "0_0.5", "\u0661", "__import__('os')")}


def test_values_are_read_by_their_looks():
    for text, value in READ.items():
        assert repr(grammar.parse_value(text)) == repr(value)


def named(part):
    return part.name, part.options


@pytest.mark.parametrize(("spec", "name", "options"), [
    ("buffer", "buffer", {}),
    ("buffer:", "buffer", {}),
    ("buffer:size=10", "buffer", {"size": 10}),
    ("buffer:size=10,rule=fifo,", "buffer", {"size": 10, "rule": "fifo"}),
    ("buffer: sample-rate = 0.1 , size = 2", "buffer", {"sample_rate": 0.1, "size": 2}),
    ("csv:path=a:b=c.csv", "csv", {"path": "a:b=c.csv"}),
    *((f"delay:path={text},repeat=5", "delay", {"path": text, "repeat": 5})  # quotes within a text are plain signs
      for text in ("o'brien/a.csv", 'a"b.csv', '"', "'a'b")),
])  # fmt: skip
def test_specs_are_read(spec, name, options):
    assert named(registry.read("timing", spec)) == (name, options)


names = st.text("abcdefgh_", min_size=1)
values = st.one_of(st.integers(), st.floats(allow_nan=False), st.booleans(), st.none())


@given(name=names, options=st.dictionaries(names, values, max_size=4))
def test_written_specs_are_read_back(name, options):
    spec = f"{name}:" + ",".join(f"{key}={value}" for key, value in options.items())
    part = registry.read("thing", spec)
    assert named(part) == (name, options) and registry.read("thing", str(part)) == part
    assert list(map(type, part.options.values())) == list(map(type, options.values()))


OBVIOUS = {
    "partition": "dirichlet:alpha=0.3", "faults": "drop:probability=0.1", "method": "fedasync:mixing=0.4",
    "part": "swa:start=0.5", "timing": "buffer:size=5", "exchange": "divshare:omega=0.1",
    "topology": "gossip:receivers=3", "policy": "power_of_choice:d=4", "delay": "csv:path=a.csv",
    "network": "link:down=1000000.0", "availability": "periodic:on=5.0", "dataset": "parquet:path=a.parquet",
    "augment": "crop:padding=2", "attack": "sign_flip:share=0.3", "privacy": "dp:clip=0.5",
    "model": "mlp:hidden=32x16", "optimizer": "sgd:momentum=0.9", "decay": "cosine:steps=50",
    "compress": "topk:ratio=0.1", "metrics": "top:k=3",
}  # fmt: skip


def test_every_entry_of_a_registry_has_a_summary():
    assert not [name for known in REGISTRIES.values() for name, made in known.items() if not factories.summary(made)]


@pytest.mark.parametrize("kind", sorted(REGISTRIES.keys() - {"client"}))  # which has no names of its own
def test_every_registry_tells_the_name_of_an_option(kind):
    name, _, option = OBVIOUS[kind].partition(":")
    spec = f"{name}:{option.partition('=')[2]}"
    said = refusal(registry.read, kind, spec, REGISTRIES[kind])
    assert said.startswith(f"{kind} = {spec!r}: options are") and f", as in {OBVIOUS[kind]} (opt" in said


def test_a_size_is_not_taken_for_a_methods_server_lr():
    said = refusal(registry.read, "method", "fedbuff:10", REGISTRIES["method"])
    assert "as in" not in said and "(options: server_lr, " in said


@given(text=st.text(st.characters(codec="ascii", categories=["L", "N", "P", "S", "Zs"]), min_size=1))
def test_a_quoted_text_is_read_back_from_any_place_in_a_spec(text):
    quote = "'" if '"' in text else '"'
    if quote in text:
        return
    spec = f"csv:path={quote}{text}{quote},repeat=5"
    assert named(registry.read("delay", spec)) == ("csv", {"path": text, "repeat": 5})
    assert grammar.joined(f"{spec}+drop:probability=0.1") == [spec, "drop:probability=0.1"]
    assert grammar.listed(f"{spec},macro_f1") == [spec, "macro_f1"]


@given(text=st.text("ab1e.+,:=/", min_size=1))
def test_a_text_that_is_written_into_a_spec_is_one_value(text):
    spec = f"csv:path={grammar.quoted(text)},repeat=5"
    assert grammar.joined(f"{spec}+drop") == [spec, "drop"]
    assert grammar.items_of(spec) == [f"path={grammar.quoted(text)}", "repeat=5"]


@pytest.mark.parametrize(("spec", "defaults", "given", "made"), [
    ("square", {}, (), ("square", 1.0, "red")),
    ("square:side=2,colour=blue", {}, (), ("square", 2, "blue")),
    ("circle:radius=3,centre-x=1,filled=true", {}, (7,), ("circle", 7, 3, 1, True)),
    ("none", {}, (), None),
    # defaults yield to the spec, and go only where they are taken
    ("square:side=2", {"side": 5, "colour": "blue", "radius": 9}, (), ("square", 2, "blue")),
    ("circle", {"side": 5, "radius": 9}, (1,), ("circle", 1, 9, 0, False)),
])  # fmt: skip
def test_bind_joins_spec_defaults_and_arguments(spec, defaults, given, made):
    assert shape(spec, **defaults).make(*given) == made


def test_a_text_with_all_signs_cannot_be_quoted_and_an_option_is_given_once():
    assert "without one of the signs" in refusal(grammar.quoted, """a,"b",'c'""")
    for spec in ("fedbuff:clip=1,clip=2", "fedbuff:server-lr=1,server_lr=1"):
        assert "must be given once, not twice" in refusal(registry.read, "method", spec)


def test_options_and_summary():
    assert list(factories.options_of(circle)) == ["radius", "centre_x", "filled"]
    assert factories.options_of(circle)["radius"].default is inspect.Parameter.empty
    assert factories.summary(square) == "A square. With a colour."
    assert factories.summary(lambda: None) == ""


def frame(*, thick: float = 2.0, dashed: bool = False) -> str:
    """Lines around a shape."""
    return f"{thick} dashed" if dashed else f"{thick}"


def glow(*, light: str = "none") -> str:
    """Light around a shape."""
    return light


@factories.takes(around=frame, shine=glow)
def hexagon(*, side: float = 1.0, around: str, colour: str = "red", shine: str) -> tuple[float | str, ...]:
    """Six sides."""
    return side, around, colour, shine


def test_taken_options_stand_where_their_group_stood():
    found = [(p.name, p.default, p.annotation) for p in factories.options_of(hexagon).values()]
    frames = [("thick", 2.0, float), ("dashed", False, bool)]
    assert found == [("side", 1.0, float), *frames, ("colour", "red", str), ("light", "none", str)]
    assert inspect.signature(hexagon).return_annotation == "tuple[float | str, ...]"
    assert factories.summary(hexagon) == "Six sides." and hexagon.__name__ == "hexagon"


def test_taken_options_reach_their_group():
    assert hexagon() == (1.0, "2.0", "red", "none")
    bound = registry.spec("shape", {"hexagon": hexagon}, "hexagon:dashed=true,side=3,light=low", thick=5)
    assert bound.make() == (3, "5 dashed", "red", "low")
    said = refusal(registry.spec, "shape", {"hexagon": hexagon}, "hexagon:around=x")
    assert "no option 'around'" in said and said.endswith(" (options: side, thick, dashed, colour, light)")
    with pytest.raises(TypeError, match="width"):
        hexagon(width=1)

    @factories.takes(around=functools.partial(frame, thick=7.0))
    def dot(*, around: str) -> str:
        return around

    # a group may be taken with another default
    assert {name: p.default for name, p in factories.options_of(dot).items()} == {"thick": 7.0, "dashed": False}
    assert (dot(), dot(thick=1.0, dashed=True)) == ("7.0", "1.0 dashed")
