"""HAR."""

from __future__ import annotations

import io
import pickletools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from fedjax_async.check import require
from fedjax_async.data.arrays import Arrays

RATE = 50.0  # samples a second
LENGTH, STEP = 128, 64  # samples of a window, and from one window to the next: 2.56 s with half overlap
ACTIVITIES = ("walking", "walking upstairs", "walking downstairs", "sitting", "standing", "laying")
TEST_SUBJECTS = (2, 4, 9, 10, 12, 13, 18, 20, 24)
# in the order in which OrthoFL's released code stacks the published signals
CHANNELS = tuple(f"{signal} {axis}" for signal in ("total_acc", "body_acc", "body_gyro") for axis in "xyz")
RAW = ("acc-x", "acc-y", "acc-z", "gyro-x", "gyro-y", "gyro-z")
# Values are rounded to this: an order of magnitude below the sensor's own step (1/720 g), and coarse enough that
# the last digits of a filter, which differ from machine to machine, cannot show in a hash.
GRAIN = 1e-4


def from_recordings(files: Mapping[str, bytes]) -> Arrays:
    """Windows float32 [M, 128, 9] of the six basic activities, split by subject as in the original data set."""
    parts: dict[bool, list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = {False: [], True: []}
    for subject, recordings in sorted(read_frames(files["HAPT.pkl"]).items()):
        for recording in recordings:
            signals = channels(np.stack([recording[name] for name in RAW], axis=1))
            starts, labels = map(np.array, zip(*windows(recording["label"])))
            x = signals[starts[:, None] + np.arange(LENGTH)]
            parts[subject in TEST_SUBJECTS].append((x, labels, np.full(len(x), subject)))
    (x, y, groups), (test_x, test_y, _) = (map(np.concatenate, zip(*parts[held_out])) for held_out in (False, True))
    return Arrays(x, y.astype(np.int32), test_x, test_y.astype(np.int32), groups.astype(np.int32))


def windows(labels: np.ndarray) -> Iterator[tuple[int, int]]:
    """(first sample, class 0..5) of every window that lies inside one stretch of one basic activity.

    ``labels`` of the samples: 1..6 for the basic activities; others (transitions, unlabelled) make no window.

    >>> list(windows(np.repeat([5, 1, 8, 1], [200, 127, 500, 128])))
    [(0, 4), (64, 4), (827, 0)]
    """
    edges = np.flatnonzero(np.diff(labels)) + 1
    for first, last in zip([0, *edges], [*edges, len(labels)]):
        if 1 <= labels[first] <= len(ACTIVITIES):
            for start in range(int(first), int(last) - LENGTH + 1, STEP):
                yield start, int(labels[first]) - 1


def channels(raw: np.ndarray) -> np.ndarray:
    """float32 [T, 9], as in ``CHANNELS``, from a whole recording's acceleration (g) and rotation (rad/s), [T, 6].

    Noise: a median filter of 3 samples and a Butterworth low-pass of third order at 20 Hz. Gravity: a Butterworth
    low-pass of third order at 0.3 Hz of the acceleration; body acceleration is the rest. Both run forward and
    backward, so that nothing is delayed; the data set's paper does not say whether its own do.
    """
    from scipy import signal  # noqa: PLC0415 - half a second, and needed only once

    require(raw.ndim == 2 and raw.shape[1] == len(RAW), "recording", raw.shape, f"{len(RAW)} signals")
    noise, gravity = (signal.butter(3, hertz, "lowpass", fs=RATE, output="sos") for hertz in (20.0, 0.3))
    median = np.stack([signal.medfilt(column, 3) for column in raw.T], axis=1)
    smooth = signal.sosfiltfilt(noise, median, axis=0)
    acceleration, rotation = smooth[:, :3], smooth[:, 3:]
    body = acceleration - signal.sosfiltfilt(gravity, acceleration, axis=0)
    together = np.concatenate([acceleration, body, rotation], axis=1)
    return (np.rint(together / GRAIN) * GRAIN).astype(np.float32)


NAMES = {
    "__builtin__ object",
    "__builtin__ slice",
    "copy_reg _reconstructor",
    "_codecs encode",
    "numpy ndarray",
    "numpy dtype",
    "numpy.core.multiarray _reconstruct",
    "pandas.core.frame DataFrame",
    "pandas.core.internals.managers BlockManager",
    "pandas.core.indexes.base Index",
    "pandas.core.indexes.range RangeIndex",
    "pandas.core.indexes.base _new_Index",
}
NUMBERS = {"f8": np.dtype("<f8"), "i8": np.dtype("<i8")}

_MARK = object()


class Made:
    """A note of a call that was not made: its name, its arguments and the state to be set afterwards."""

    def __init__(self, name: Any, arguments: Any) -> None:
        require(isinstance(name, str) and name in NAMES, "pickle", "a call of something else", "a call of a name")
        self.name, self.arguments = name, arguments
        self.state: Any = None


class Machine:
    """The stack and the memo of a pickle's program."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def marked(self) -> list[Any]:
        """Everything above the last mark, taken off with it."""
        at = max(i for i, item in enumerate(self.stack) if item is _MARK)
        items = self.stack[at + 1 :]
        del self.stack[at:]
        return items

    def name(self, name: str) -> None:
        """A name goes on the stack as text, if it is one of those allowed."""
        require(name in NAMES, "pickle", f"names {name}", f"frames: only {', '.join(sorted(NAMES))} are known")
        self.stack.append(name)

    def call(self) -> None:
        """Name and arguments are replaced by the note of a call."""
        arguments = self.stack.pop()
        self.stack.append(Made(self.stack.pop(), arguments))

    def build(self) -> None:
        """The state of the note below."""
        state = self.stack.pop()
        require(isinstance(self.stack[-1], Made), "pickle", "a state of something else", "of what was made")
        self.stack[-1].state = state

    def items(self, items: list[Any]) -> None:
        """Items into the list below."""
        self.stack[-1].extend(items)

    def pairs(self, items: list[Any]) -> None:
        """Keys and values into the dict below."""
        self.stack[-1].update(zip(items[::2], items[1::2], strict=True))


# what each instruction does; those that frames do without are missing, and refused
INSTRUCTIONS: dict[str, Callable[[Machine, Any], Any]] = {
    **{name: lambda m, value: m.stack.append(value) for name in ("INT", "BININT", "BININT1", "BININT2", "BINUNICODE")},
    **{name: lambda m, key: m.memo.update({key: m.stack[-1]}) for name in ("BINPUT", "LONG_BINPUT")},
    **{name: lambda m, key: m.stack.append(m.memo[key]) for name in ("BINGET", "LONG_BINGET")},
    "PROTO": lambda m, version: None,
    "STOP": lambda m, _: None,
    "NONE": lambda m, _: m.stack.append(None),
    "MARK": lambda m, _: m.stack.append(_MARK),
    "EMPTY_DICT": lambda m, _: m.stack.append({}),
    "EMPTY_LIST": lambda m, _: m.stack.append([]),
    "TUPLE": lambda m, _: m.stack.append(tuple(m.marked())),
    "APPENDS": lambda m, _: m.items(m.marked()),
    "SETITEMS": lambda m, _: m.pairs(m.marked()),
    "SETITEM": lambda m, _: m.pairs([m.stack.pop(-2), m.stack.pop()]),
    "GLOBAL": lambda m, name: m.name(name),
    "REDUCE": lambda m, _: m.call(),
    "BUILD": lambda m, _: m.build(),
}


def read_frames(data: bytes) -> dict[int, list[dict[str, np.ndarray]]]:
    """Columns by name of each person's frames, from a pickled ``{person: [DataFrame, ...]}`` of numeric columns.

    Raises ``ValueError`` for any other bytes, with nothing done that they ask for.
    """
    machine = Machine()
    try:
        for instruction, argument, _ in pickletools.genops(io.BytesIO(data)):
            known = instruction.name in INSTRUCTIONS
            require(known, "pickle", f"instruction {instruction.name}", f"one of {', '.join(INSTRUCTIONS)}")
            INSTRUCTIONS[instruction.name](machine, argument)
        (people,) = machine.stack
        return {int(person): [_columns(frame) for frame in frames] for person, frames in people.items()}
    except ValueError:
        raise
    except Exception as error:  # a made-up program may fail anywhere
        raise ValueError(f"pickle = {len(data)} bytes: must hold pandas frames ({type(error).__name__})") from error


def _columns(frame: Made) -> dict[str, np.ndarray]:
    """The columns of a frame, from the blocks of equal type in which its manager keeps them."""
    parts = frame.state["_data"].state[3]["0.14.1"]
    names = [str(name) for name in _array(parts["axes"][0].arguments[1]["data"])]
    columns: dict[str, np.ndarray] = {}
    for block in parts["blocks"]:
        places = block["mgr_locs"]
        in_a_row = places.name == "__builtin__ slice"
        chosen = names[slice(*places.arguments)] if in_a_row else [names[i] for i in _array(places)]
        columns |= dict(zip(chosen, _array(block["values"]), strict=True))
    require(set(columns) == set(names), "columns", sorted(columns), f"{sorted(names)}")
    return columns


def _array(made: Made) -> Any:
    """The array of a note: numbers as an array, objects as the list that they are stored as."""
    _, shape, kind, by_columns, content = made.state
    code = kind.arguments[0]
    if code == "O8":
        return content
    require(code in NUMBERS, "pickle", f"an array of {code!r}", f"one of {', '.join(NUMBERS)}, O8")
    text, encoding = content.arguments
    require(encoding == "latin1", "pickle", f"bytes as {encoding!r}", "as latin1")
    values = np.frombuffer(text.encode("latin1"), NUMBERS[code])
    return values.reshape(shape, order="F" if by_columns else "C")
