"""Reads XLA's listing of a program compiled for a GPU, and counts what a run of it does on the card and on the host.

XLA writes two texts for a program (``--xla_dump_to``): the optimised module, which names its loops, and the sequence of
its *thunks*, what the host or a graph issues in turn. Four words for what is counted:

- a *launch*: a kernel, a copy, a fill, or a call of cuBLAS or cuDNN (which may be several kernels);
- a *graph*: launches that the card replays without the host (``CommandBuffer``);
- an *answer*: a flag that the host copies from the card and waits for, as at each pass of a loop whose length the
  program does not know, unless the loop is inside a graph;
- *passes*: how often the body of a loop runs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import NamedTuple

LOOP = "loop:"  # how ``fedjax_async.base.tree.loop`` marks a loop
_THUNK = re.compile(r"( *)(\d+): k(\w+)\s*\[")
_PART = re.compile(r"( *)([\w.]+):\s*$")
_WHILE = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = .* while\(.*$", re.M)
_GROUPS = ("CommandBuffer", "Sequential", "AsyncStart", "AsyncDone")  # thunks that launch nothing themselves


class Thunk:
    """A launch; or a loop, a branch or a graph, with thunks in named parts."""

    def __init__(self, number: int, kind: str) -> None:
        self.number, self.kind = number, kind
        self.parts: dict[str, list[Thunk]] = {}  # of a loop: condition, body; of a branch: its cases

    @property
    def launches(self) -> bool:
        """Whether it is a launch itself."""
        return not self.parts and self.kind not in (*_GROUPS, "While", "Conditional")


class Loop(NamedTuple):
    """A loop of the module: its length if the program knows it, and where the package made it."""

    length: int | None
    place: str  # JAX's path of names, such as "jit(receive)/loop:arrivals/while"

    @property
    def name(self) -> str | None:
        """The mark of ``base.tree.loop``; None for a loop without one."""
        found = re.search(rf"{LOOP}([\w ]+)\)*/while$", self.place)
        return found[1] if found else None


class Counts(NamedTuple):
    """What is issued, over a whole run."""

    launches: float = 0
    in_graphs: float = 0  # launches that a graph replays
    graphs: float = 0  # launched by the host
    answers: float = 0

    def times(self, factor: float) -> Counts:
        """As often as ``factor`` says."""
        return Counts(*(factor * one for one in self))

    def plus(self, other: Counts) -> Counts:
        """Both together."""
        return Counts(*(a + b for a, b in zip(self, other)))


class Row(NamedTuple):
    """One loop of a program, in a whole run."""

    loop: str  # its name; the place of one without
    depth: int
    passes: float
    each: Counts  # of one pass, with the loops inside that are no rows of their own


def thunks_of(text: str) -> list[Thunk]:
    """The thunks of a ``thunk_sequence`` file. Children are indented by four, the names of parts by two."""
    top: list[Thunk] = []
    path: list[Thunk] = []  # the newest thunk of each depth
    part: dict[int, str] = {}  # depth -> which part of the thunk there is being read
    for line in text.splitlines():
        thunk, header = _THUNK.match(line), _PART.match(line)
        if thunk:
            depth = len(thunk[1]) // 4
            one = Thunk(int(thunk[2]), thunk[3])
            del path[depth:]
            (path[-1].parts.setdefault(part.get(depth - 1, "body"), []) if path else top).append(one)
            path.append(one)
            part[depth] = "body"
        elif header and path:  # a condition is never indented: it is of the loop that was just read
            depth = len(path) - 1 if header[2] == "condition" else (len(header[1]) - 2) // 4
            part[depth] = header[2]
            del path[depth + 1 :]
    return top


def loops_of(module: str) -> dict[str, Loop]:
    """The loops of an optimised module, by the name of their instruction."""
    found = {}
    for match in _WHILE.finditer(module):
        length = re.search(r'"known_trip_count":\{"n":"(\d+)"', match[0])
        place = re.search(r'op_name="([^"]*)"', match[0])
        found[match[1]] = Loop(int(length[1]) if length else None, place[1] if place else "")
    return found


def names_of(metadata: str) -> dict[int, str]:
    """The instruction of each thunk, from a ``thunk_metadata`` file."""
    pairs = re.findall(r'profile_annotation: "([^"]*)"\s+thunk_id: (\d+)', metadata)
    return {int(number): name for name, number in pairs}


_COMPUTATION = re.compile(r"^(?:ENTRY )?%([\w.\-]+) \(.*\{$", re.M)
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*?)\)(?:,|$)", re.M)
_SHAPE = re.compile(r"([a-z]+\d*)\[([\d,]*)\]")
_BYTES = {"f64": 8, "s64": 8, "f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "pred": 1}  # no bytes of workspace
_FREE = {"parameter", "get-tuple-element", "tuple", "bitcast", "constant", "while"}


def traffic_of(module: str) -> int:
    """Bytes that the kernels of a module's first loop read and write in a pass; an operand counts as a whole."""
    body = re.search(r"body=%([\w.\-]+)", module)
    parts = _COMPUTATION.split(module)
    text = dict(zip(parts[1::2], parts[2::2])).get(body[1], "") if body else ""
    sizes: dict[str, list[int]] = {}
    total = 0
    for name, shape, operation, operands in _INSTRUCTION.findall(text.partition("\n}")[0]):
        found = [
            _BYTES.get(kind, 0) * math.prod(map(int, filter(None, n.split(",")))) for kind, n in _SHAPE.findall(shape)
        ]
        sizes[name] = found
        if operation in _FREE:
            continue
        total += sum(found)
        for operand, element in re.findall(r"%([\w.\-]+)(?:#(\d+))?", operands):
            known = sizes.get(operand, [])
            total += sum(known if not element else known[int(element) : int(element) + 1])
    return total


def count(
    thunks: list[Thunk],
    loops: dict[str, Loop],
    names: dict[int, str],
    passes: Callable[[str, float], float],
    calls: float,
) -> tuple[Counts, list[Row]]:
    """What ``calls`` calls of a program issue, and its loops.

    ``passes(name, times)``: passes of such a loop over the run, in which it is reached ``times`` times. Of a branch the
    longest case is counted. Raises ``ValueError`` for a loop of unknown length that has no name.
    """
    rows: list[Row] = []

    def visit(part: list[Thunk], times: float, graph: bool, depth: int) -> tuple[Counts, Counts]:
        """Counts of one pass through ``part`` without loops; and of the loops inside, over the whole run."""
        own, inner = Counts(), Counts()
        for thunk in part:
            if thunk.launches:
                own = own.plus(Counts(1, int(graph)))
            elif thunk.kind == "Conditional":
                cases = [visit(case, times, graph, depth) for case in thunk.parts.values()]
                own = own.plus(max((case[0] for case in cases), default=Counts()))
                own = own.plus(Counts(answers=0 if graph else 1))
                for case in cases:
                    inner = inner.plus(case[1])
            elif thunk.kind == "While":
                inner = inner.plus(loop(thunk, times, graph, depth))
            else:
                captured = thunk.kind == "CommandBuffer"
                one, more = visit(thunk.parts.get("body", []), times, graph or captured, depth)
                own, inner = own.plus(one).plus(Counts(graphs=captured and not graph)), inner.plus(more)
        return own, inner

    def loop(thunk: Thunk, times: float, graph: bool, depth: int) -> Counts:
        length, _ = known = loops.get(names.get(thunk.number, ""), Loop(None, "?"))
        if length is None and known.name is None:
            raise ValueError(f"a loop of unknown length without a name, at {known.place!r}: make it with tree.loop")
        turns = passes(str(known.name), times) if length is None else times * length
        number = len(rows)
        rows.append(Row("", depth, 0, Counts()))
        body, more = visit(thunk.parts.get("body", []), turns, graph, depth + 1)
        test, _ = visit(thunk.parts.get("condition", []), turns + times, graph, depth)
        asks = length is None and not graph
        rows[number] = Row(known.name or known.place, depth, turns, body)
        tests = Counts() if length is not None and not graph else test.times(turns + times)  # else the host counts
        return body.times(turns).plus(more).plus(tests).plus(Counts(answers=(turns + times) if asks else 0))

    each, inside = visit(thunks, calls, False, 0)
    return each.times(calls).plus(inside), rows
