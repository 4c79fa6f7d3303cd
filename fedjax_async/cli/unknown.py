"""What may have been meant by an argument that a command does not know, for the message about it."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

from fedjax_async.config import words
from fedjax_async.config.settings import SWEEP_KEYS, Settings

FIELDS = Settings.__dataclass_fields__
SWITCHES = ("yes", "no", "true", "false", "on", "off", "0", "1")
FEW = 6  # flags of a command; --help shows them at a glance


class Known(NamedTuple):
    """What a command knows."""

    flags: Collection[str]  # its own, such as --lr
    instead: str  # where else a command takes the setting {name} from; empty if from nowhere
    owners: Sequence[str]  # other commands with the unknown flag


def hint(left: Sequence[str], found: object, known: Known) -> str:
    """The end of the message about the unknown arguments ``left``; ``found``: the namespace of the known ones."""
    first, _, value = left[0].partition("=")
    value = value or next((each for each in left[1:2] if not each.startswith("-")), "")
    names = [flag.removeprefix("--").replace("-", "_") for flag in known.flags if flag.startswith("--")]
    word = words.plain(first)
    if not first.startswith("--"):
        return _without_dashes(left[0], word, names)
    setting = word if word in FIELDS else words.meant(word, FIELDS)
    absent = setting is not None and setting.partition("=")[0] not in names
    if known.instead and (absent or word in SWEEP_KEYS):
        return f"; {known.instead.format(name=(setting or word).partition('=')[0])}"
    if known.owners:
        of = " and ".join([*known.owners[:2], *(["others"] if len(known.owners) > 2 else [])])
        example = " ".join(filter(None, (known.owners[0], "...", first, value)))
        return f"; {first} is a flag of {of}: fedjax-async {example}"
    if (place := _in_spec(found, word, value, names)) is not None:
        return f"; it is an option of {place}"
    few = len(names) <= FEW and words.suggested(first, names) is None
    return "" if few else words.hint(first, names, as_flag)


def _without_dashes(argument: str, word: str, names: Collection[str]) -> str:
    """The hint for an argument that does not begin with two dashes: a flag or a method without its flag."""
    if word in SWITCHES:
        return "; a flag without a NAME or N in --help, such as --quiet, has no value: give it, or leave it out"
    if word in names or words.meant(word, names) is not None:
        return f"; did you mean {as_flag(words.meant(word, names) or word)}?"
    return f"; did you mean --method {argument}?" if "method" in names and _is_method(argument) else ""


def as_flag(name: str) -> str:
    """A setting, or a setting with ``=`` and an example, as a flag of the command line.

    >>> as_flag("batch_size"), as_flag("timing=cohort:size=5")
    ('--batch-size', '--timing cohort:size=5')
    """
    setting, equals, example = name.partition("=")
    return f"--{setting.replace('_', '-')}" + (f" {example}" if equals else "")


def _is_method(text: str) -> bool:
    """Whether a text begins with the name of a method."""
    from fedjax_async.config.registries import METHODS  # noqa: PLC0415 (needs JAX)

    return re.split("[:+@]", text)[0] in METHODS


def _in_spec(found: object, option: str, value: str, names: Collection[str]) -> str | None:
    """Where an option of the given methods, of their timings or of other given settings is written; None for no such.

    ``found``: the namespace of the given flags.
    """
    if not {"method", "timing"} & set(names):
        return None
    from fedjax_async.config.labelling import split  # noqa: PLC0415 (config imports JAX)
    from fedjax_async.config.methods import owner_of  # noqa: PLC0415 (needs JAX)
    from fedjax_async.config.misplaced import in_others, in_spec  # noqa: PLC0415
    from fedjax_async.config.registries import REGISTRIES  # noqa: PLC0415

    value = value or "..."
    if (place := in_others(REGISTRIES, vars(found), option, value)) is not None:
        return place.text(lambda of, text: as_flag(f"{of}={text}"))
    usual = [getattr(found, "method", Settings.method)] if "method" in names else []
    for word in getattr(found, "methods", usual):
        try:
            place = owner_of(split(word)[1], option, value)
        except ValueError:  # the method is unknown, which is another error
            continue
        if place is not None:
            return place.text(in_spec if hasattr(found, "methods") else lambda of, text: as_flag(f"{of}={text}"))
    return None
