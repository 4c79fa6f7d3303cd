"""UCI's recordings of human activities (HAR): from a phone's raw signals to filtered windows, each of one subject.

The recordings come as a pickle of old pandas frames, which is read without pandas and without unpickling. A pickle is
a program for a stack machine, and it can call any function. The machine here calls nothing: it records each call
(``RecordedCall``). The tables are read from these records.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from fedjax_async.base.check import require
from fedjax_async.data.arrays import Arrays

RATE = 50.0  # samples per second
LENGTH, STEP = 128, 64  # samples in a window and between the starts of two windows: 2.56 s with half overlap
ACTIVITIES = ("walking", "walking upstairs", "walking downstairs", "sitting", "standing", "laying")
TEST_SUBJECTS = (2, 4, 9, 10, 12, 13, 18, 20, 24)
# in the order in which OrthoFL's released code stacks the published signals
CHANNELS = tuple(f"{signal} {axis}" for signal in ("total_acc", "body_acc", "body_gyro") for axis in "xyz")
RAW = ("acc-x", "acc-y", "acc-z", "gyro-x", "gyro-y", "gyro-z")
# Values are rounded to multiples of this. It is a tenth of the sensor's own step (1/720 g), and large enough to remove
# the last digits of a filter, which differ between machines and would change the hash.
GRAIN = 1e-4


def from_recordings(files: Mapping[str, bytes]) -> Arrays:
    """Windows float32 [M, 128, 9] of the six basic activities, with the original split by subject."""
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
    """(first sample, class 0..5) of every window that lies within one uninterrupted basic activity.

    ``labels``: one per sample; 1..6 are the basic activities, others (transitions, unlabelled) give no window.

    >>> list(windows(np.repeat([5, 1, 8, 1], [200, 127, 500, 128])))
    [(0, 4), (64, 4), (827, 0)]
    """
    edges = np.flatnonzero(np.diff(labels)) + 1
    for first, last in zip([0, *edges], [*edges, len(labels)]):
        if 1 <= labels[first] <= len(ACTIVITIES):
            for start in range(int(first), int(last) - LENGTH + 1, STEP):
                yield start, int(labels[first]) - 1


def channels(raw: np.ndarray) -> np.ndarray:
    """The signals ``CHANNELS`` of a whole recording [T, 9], float32, from acceleration (g) and rotation (rad/s) [T, 6].

    Noise is removed by a median filter of 3 samples and a Butterworth low-pass of third order at 20 Hz. Gravity is the
    acceleration after a Butterworth low-pass of third order at 0.3 Hz; body acceleration is acceleration minus gravity.
    Both low-pass filters run forward and backward, so that they delay nothing; the data set's paper does not state
    this.
    """
    from scipy import signal  # noqa: PLC0415 - half a second, and needed only once

    require(raw.ndim == 2 and raw.shape[1] == len(RAW), "recording", raw.shape, f"{len(RAW)} signals")
    noise, gravity = (signal.butter(3, hertz, "lowpass", fs=RATE, output="sos") for hertz in (20.0, 0.3))
    median = np.stack([signal.medfilt(column, 3) for column in raw.T], axis=1)
    smooth = signal.sosfiltfilt(noise, median, axis=0)
    acceleration, rotation = smooth[:, :3], smooth[:, 3:]
    body = acceleration - signal.sosfiltfilt(gravity, acceleration, axis=0)
    joined = np.concatenate([acceleration, body, rotation], axis=1)
    return (np.rint(joined / GRAIN) * GRAIN).astype(np.float32)


DTYPES = {"f8": np.dtype("<f8"), "i8": np.dtype("<i8")}

_MARK = object()


class RecordedCall:
    """A call that was not executed: the name of the function, the arguments, and the state of the result."""

    def __init__(self, name: object, arguments: Any) -> None:
        self.name, self.arguments = name, arguments
        self.state: Any = None


class StackMachine:
    """The stack and the memo of a pickle's program."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, object] = {}

    def pop_marked(self) -> list[object]:
        """Remove the last mark and everything above it; return what was above."""
        at = max(i for i, item in enumerate(self.stack) if item is _MARK)
        items = self.stack[at + 1 :]
        del self.stack[at:]
        return items

    def record_call(self) -> None:
        """Replace the name and the arguments on top by a recorded call."""
        arguments = self.stack.pop()
        self.stack.append(RecordedCall(self.stack.pop(), arguments))

    def extend(self, items: list[object]) -> None:
        """Append items to the list on top."""
        self.stack[-1].extend(items)

    def update(self, items: list[object]) -> None:
        """Put keys and values into the dict on top."""
        self.stack[-1].update(zip(items[::2], items[1::2], strict=True))


# what each instruction does; any instruction that frames do not need is refused
INSTRUCTIONS: dict[str, Callable[[StackMachine, Any], object]] = {
    **dict.fromkeys(
        ("INT", "BININT", "BININT1", "BININT2", "BINUNICODE", "GLOBAL"), lambda m, value: m.stack.append(value)
    ),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), lambda m, key: m.memo.update({key: m.stack[-1]})),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda m, key: m.stack.append(m.memo[key])),
    **dict.fromkeys(("PROTO", "STOP"), lambda m, _: None),
    "NONE": lambda m, _: m.stack.append(None),
    "MARK": lambda m, _: m.stack.append(_MARK),
    "EMPTY_DICT": lambda m, _: m.stack.append({}),
    "EMPTY_LIST": lambda m, _: m.stack.append([]),
    "TUPLE": lambda m, _: m.stack.append(tuple(m.pop_marked())),
    "APPENDS": lambda m, _: m.extend(m.pop_marked()),
    "SETITEMS": lambda m, _: m.update(m.pop_marked()),
    "SETITEM": lambda m, _: m.update([m.stack.pop(-2), m.stack.pop()]),
    "REDUCE": lambda m, _: m.record_call(),
    "BUILD": lambda m, _: setattr(m.stack[-2], "state", m.stack.pop()),
}


def read_frames(data: bytes) -> dict[int, list[dict[str, np.ndarray]]]:
    """Columns by name of each person's frames, from a pickled ``{person: [DataFrame, ...]}`` of numeric columns.

    Raises ``ValueError`` for any other bytes; nothing in them is executed.
    """
    machine = StackMachine()
    try:
        for instruction, argument, _ in pickletools.genops(io.BytesIO(data)):
            known = instruction.name in INSTRUCTIONS
            require(known, "pickle", f"instruction {instruction.name}", f"one of {', '.join(INSTRUCTIONS)}")
            INSTRUCTIONS[instruction.name](machine, argument)
        (people,) = machine.stack
        return {int(person): [_columns(frame) for frame in frames] for person, frames in people.items()}
    except ValueError:
        raise
    except Exception as error:  # a hostile program may fail anywhere
        raise ValueError(f"pickle = {len(data)} bytes: must hold pandas frames ({type(error).__name__})") from error


def _columns(frame: RecordedCall) -> dict[str, np.ndarray]:
    """The columns of a frame by name, from its blocks of columns of equal type."""
    parts = frame.state["_data"].state[3]["0.14.1"]
    names = [str(name) for name in _array(parts["axes"][0].arguments[1]["data"])]
    columns: dict[str, np.ndarray] = {}
    for block in parts["blocks"]:
        where = block["mgr_locs"]
        is_slice = where.name == "__builtin__ slice"
        chosen = names[slice(*where.arguments)] if is_slice else [names[i] for i in _array(where)]
        columns |= dict(zip(chosen, _array(block["values"]), strict=True))
    require(set(columns) == set(names), "columns", sorted(columns), f"{sorted(names)}")
    return columns


def _array(call: RecordedCall) -> Any:
    """The array that a recorded call would make; for an array of objects, the list of them."""
    _, shape, kind, by_columns, content = call.state
    code = kind.arguments[0]
    if code == "O8":
        return content
    require(code in DTYPES, "pickle", f"an array of {code!r}", f"one of {', '.join(DTYPES)}, O8")
    text, encoding = content.arguments
    require(encoding == "latin1", "pickle", f"bytes as {encoding!r}", "as latin1")
    values = np.frombuffer(text.encode("latin1"), DTYPES[code])
    return values.reshape(shape, order="F" if by_columns else "C")
