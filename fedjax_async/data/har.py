"""UCI's recordings of human activities: from a phone's raw signals to filtered windows with a subject each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from fedjax_async.check import require
from fedjax_async.data.frames import read_frames
from fedjax_async.data.published import Arrays

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
