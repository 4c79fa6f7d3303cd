"""Whether two runs are the same: a saved description of a run against the wanted one, as JSON has them.

Numbers are compared by value (1800 and 1800.0 are one setting, True and 1 are not), specs without regard to the order
of options and the spelling of numbers, and input files by their content: a moved copy is the same file.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from typing import Any

from fedjax_async.base.check import shown
from fedjax_async.base.grammar import is_plain_number

FILES, OWN = "files", "own"  # beside the settings: digests of input files, fingerprints of the user's own parts
SHORT = 12  # characters of a digest in a message
_OPTIONS = re.compile(r"[^:,+@=]+=[^:,+@=]*(?:,[^:,+@=]+=[^:,+@=]*)*")
_PLUS = r"(?<!\d[eE])\+|\+(?!\d)"  # between the parts of a spec, not in a number such as 1e+22

# Settings of earlier versions that changed no result; a folder may still have them.
GONE = ("fixed_steps", "waves_per_call")


def difference(saved: object, wanted: object) -> str:
    """How a saved value differs from the wanted one, in a few words; empty if they are the same.

    Of mappings, such as settings, it names up to three keys, and of an input file its path.

    >>> difference({"lr": 0.1, "time": 1800}, {"lr": 0.2, "time": 1800.0})
    'lr = 0.2, saved 0.1'
    >>> difference({"time": 1800, "method": "a:b=1,c=2"}, {"time": 1800.0, "method": "a:c=2.0,b=1"})
    ''
    """
    if isinstance(saved, list) and isinstance(wanted, list) and len(saved) == len(wanted):
        return next(filter(None, map(difference, saved, wanted)), "")
    if not isinstance(saved, Mapping) or not isinstance(wanted, Mapping):
        return "" if _normal(saved) == _normal(wanted) else f"{shown(wanted)}, saved {shown(saved)}"
    files, own = (_of_files(saved), _of_files(wanted)), (saved.get(OWN), wanted.get(OWN))
    found = [text for key in {**saved, **wanted} if (text := _of_key(key, saved.get(key), wanted.get(key), *files))]
    found += _of_code(*(each if isinstance(each, Mapping) else {} for each in own))
    return ", ".join(found[:3]) + (f", and {len(found) - 3} more" if len(found) > 3 else "")


def unknown_files(saved: object, wanted: object) -> list[str]:
    """The input files of the wanted run whose content the saved description does not tell, being older."""
    if isinstance(saved, list) and isinstance(wanted, list):
        return list(dict.fromkeys(path for pair in zip(saved, wanted) for path in unknown_files(*pair)))
    if not isinstance(saved, Mapping) or not isinstance(wanted, Mapping):
        return []
    known = _of_files(saved)
    return [path for field, one in _of_files(wanted).items() if field not in known for path, _ in one["sha256"]]


def content(described: Mapping[str, object]) -> dict[str, object]:
    """A description of a run without the paths of its input files, the same for a copy of them elsewhere."""
    files = {field: [one["spec"], [found for _, found in one["sha256"]]] for field, one in _of_files(described).items()}
    return {key: value for key, value in described.items() if key != FILES} | files


def _of_key(
    key: str, saved: object, wanted: object, saved_files: Mapping[str, Any], wanted_files: Mapping[str, Any]
) -> str:
    """How the value of one key differs; empty if it does not."""
    if key in (FILES, OWN, *GONE):
        return ""
    before, now = saved_files.get(key), wanted_files.get(key)
    if before is None or now is None:
        return "" if _normal(saved) == _normal(wanted) else f"{key} = {shown(wanted)}, saved {shown(saved)}"
    if _normal(before["spec"]) != _normal(now["spec"]):
        return f"{key} = {shown(wanted)}, saved {shown(saved)}"
    if len(before["sha256"]) != len(now["sha256"]):
        return f"files of {key} = {len(now['sha256'])}, saved {len(before['sha256'])}"
    for (old, was), (path, have) in zip(before["sha256"], now["sha256"]):
        if was != have:
            moved = "" if old == path else f" of {old}"
            return f"content of {path} ({key}) = {have[:SHORT]}, saved {was[:SHORT]}{moved}"
    return ""


def _of_code(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """How the fingerprints of the user's own parts differ."""
    found = []
    for field in {**saved, **wanted}:
        one, other = saved.get(field) or {}, wanted.get(field) or {}
        for name in {**one, **other}:
            if one.get(name) != other.get(name):
                before, now = (str(each.get(name))[:SHORT] for each in (one, other))
                found.append(f"code of {field} {name!r} = {now}, saved {before}")
    return found


def _of_files(described: Mapping[str, object]) -> dict[str, dict[str, Any]]:
    """Field -> spec and digests of its files; without entries of another form, as in a damaged file."""
    files = described.get(FILES)
    return {field: one for field, one in files.items() if _fits(one)} if isinstance(files, Mapping) else {}


def _fits(one: object) -> bool:
    if not isinstance(one, Mapping):
        return False
    pairs = one.get("sha256")
    if not isinstance(pairs, (list, tuple)) or not isinstance(one.get("spec"), str):
        return False
    known = [pair for pair in pairs if isinstance(pair, (list, tuple)) and list(map(type, pair)) == [str, str]]
    return len(known) == len(pairs)


def _normal(value: Any) -> object:
    """A value in its normal form: equal exactly if it means the same setting."""
    if value is None or isinstance(value, bool):
        return repr(value)
    if isinstance(value, (int, float)):
        return ("number", _number(value))
    if isinstance(value, str):
        return ("text", _text(value))
    if isinstance(value, Mapping):
        return {key: normal for key, item in value.items() if (normal := _normal(item)) != "None"}
    return [_normal(item) for item in value]


def _number(value: float) -> str:
    try:
        return repr(float(value)).replace("+", "") if float(value) == value else repr(value)
    except OverflowError:  # a whole number above the largest float
        return repr(value)


def _text(text: str) -> str:
    """A text, perhaps a spec: numbers by their value, options in the order of their names, no spaces around them."""
    plain = "".join(map(_token, re.split(rf"([:,@=]|{_PLUS})", text)))
    return _OPTIONS.sub(lambda found: ",".join(sorted(map(_option, found[0].split(",")))), plain)


def _token(token: str) -> str:
    token = token.strip()
    if token.lower() in ("true", "false", "none"):
        return token.lower()
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return _number(kind(token)) if is_plain_number(token) else token
    return token


def _option(item: str) -> str:
    name, equals, value = item.partition("=")
    return name.replace("-", "_") + equals + value
