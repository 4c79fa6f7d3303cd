"""Checks of the values of settings, beyond their types, and example values for error messages."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

from fedjax_async import check

MOMENTS = "a text of virtual seconds >= 0 joined by commas, such as '100,500'"


def _one_of(*names: str) -> Callable[[str, Any], None]:
    return lambda field, value: check.one_of(field, value, names)


def _known(field: str, value: Any) -> None:
    """One of the names of a registry. The registries need JAX, so they are imported only for a given value."""
    from fedjax_async.data.normalise import NORMALISATIONS  # noqa: PLC0415
    from fedjax_async.engine.batches import BATCHINGS  # noqa: PLC0415
    from fedjax_async.engine.peer_result import GLOBAL_TESTS  # noqa: PLC0415
    from fedjax_async.engine.storage import SLOT_DTYPES  # noqa: PLC0415
    from fedjax_async.geometry import GROUPINGS  # noqa: PLC0415
    from fedjax_async.local import FEEDBACKS  # noqa: PLC0415

    registries: dict[str, Iterable[str]] = {
        "global_tests": GLOBAL_TESTS,
        "feedback": FEEDBACKS,
        "compress_per": GROUPINGS,
        "slots": SLOT_DTYPES,
        "batching": BATCHINGS,
        "normalise": NORMALISATIONS,
    }
    check.one_of(field, value, registries[field])


def _size(field: str, value: Any) -> None:
    from fedjax_async.engine.devices import parse_size  # noqa: PLC0415

    parse_size(field, value)


def _fraction(field: str, value: Any) -> None:
    check.require(check.is_real(value) and 0 < value < 1, field, value, "a number between 0 and 1, both excluded")


def moments(text: str) -> list[float]:
    """``"100,500"`` -> [100.0, 500.0]; ``ValueError`` naming ``eval_at``."""
    try:
        plain = text.isascii() and "_" not in text
        found = [float(part) if plain else -1.0 for part in text.split(",")]
    except ValueError:
        found = [-1.0]
    check.require(all(check.is_real(moment) and moment >= 0 for moment in found), "eval_at", text, MOMENTS)
    check.require(
        all(a < b for a, b in itertools.pairwise(found)), "eval_at", text, "in increasing order, each moment once"
    )
    return found


MOST_LANES = 1024  # each is a thread of the host

# Checks of values other than the default.
CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "clients": check.whole,
    "batch_size": check.whole,
    "lr": check.real_positive,
    "ditto": check.real_non_negative,
    "time": check.real_positive,
    "updates": check.whole,
    "server_steps": check.whole,
    "eval_time": check.real_positive,
    "eval_updates": check.whole,
    "eval_steps": check.whole,
    "eval_at": lambda field, value: moments(value),
    "seed": lambda field, value: check.whole(field, value, low=0, high=2**31 - 1),
    "engine": _one_of("waves", "reference"),
    "on_bad": _one_of("reject", "raise"),
    "compute": _one_of("float32", "bfloat16", "float64"),
    "late": _one_of("apply", "drop"),
    "feedback": _known,
    "compress_per": _known,
    "slots": _known,
    "global_tests": _known,
    "batching": _known,
    "normalise": _known,
    "eval_examples": check.whole,
    "train_examples": check.whole,
    "fine_tune": check.whole,
    "stop_at": check.positive,
    "patience": check.whole,
    "max_width": check.whole,
    "lanes": lambda field, value: check.whole(field, value, high=MOST_LANES),
    "devices": check.whole,
    "checkpoint": check.whole,
    "timeout": check.real_positive,
    "norm_limit": check.real_positive,
    "test_fraction": _fraction,
    "validation_fraction": _fraction,
    "epochs": check.real_positive,
    "steps": lambda field, value: check.whole(field, value, high=2**31 - 1),
    "max_staleness": lambda field, value: check.whole(field, value, low=0),
    "memory_limit": _size,
}

# Examples for settings that hold a text and have no default to show.
EXAMPLES = {
    "timing": "a text such as 'every'",
    "policy": "a text such as 'oort'",
    "topology": "a text such as 'gossip:receivers=10'",
    "exchange": "a text such as 'push_sum:policy=merge'",
    "global_tests": "a text such as 'ends'",
    "availability": "a text such as 'sessions'",
    "faults": "a text such as 'drop:probability=0.1'",
    "network": "a text such as 'link:down=1e6,up=2e5'",
    "partition": "a text such as 'iid'",
    "augment": "a text such as 'crop:padding=4+flip'",
    "attack": "a text such as 'sign_flip:share=0.2'",
    "privacy": "a text such as 'dp:clip=1,noise=0.5'",
    "normalise": "a text such as 'training'",
    "personal": "a text such as 'output'",
    "initial": "a text, the name of a file or folder",
    "initial_rename": "a text such as 'conv1=features.0,fc1=classifier'",
    "client": "a text, the name of a registered client",
    "compress": "a text such as 'topk:ratio=0.1'",
    "feedback": "a text such as 'ef'",
    "compress_per": "a text such as 'layer'",
    "eval_at": MOMENTS,
    "batching": "a text such as 'vmap'",
    "optimizer": "a text such as 'sgd:momentum=0.9'",
    "metrics": "a text such as 'top:k=5,macro_f1'",
    "energy": "a text such as 'csv:path=watts.csv'",
    "memory_limit": "a text such as '4GB'",
}
