"""The input files that settings name: data, tables of delays and the like, initial weights, a pretrained model.

``with_files`` gives each such setting the digests of its files. They are kept in ``settings.json`` under ``files``, so
that two runs are the same only if their files have the same content, wherever the files are.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import Any

from fedjax_async.base import identity, inputs
from fedjax_async.base.grammar import Name
from fedjax_async.base.inputs import FileSpec
from fedjax_async.config import own
from fedjax_async.config.names import read
from fedjax_async.config.problem import initial_file, read_data
from fedjax_async.config.settings import Settings, fields_of
from fedjax_async.models import MODELS

# models with files of their own -> what lists them, from their option ``path``
LISTERS = {name: model.input_files for name, model in MODELS.items() if hasattr(model, "input_files")}
PATH = "path"  # an option of this name is an input file, also in a factory of the user's own


def with_files(settings: Settings, *, only: Collection[str] | None = None) -> Settings:
    """The settings with the digests of all input files that exist; ``only``: of these settings.

    Settings from a file have the digests from the beginning of their run: ``ValueError`` naming a file that has changed
    since.
    """
    found: dict[str, Any] = {}
    for field, value in fields_of(settings).items():
        if (only is None or field in only) and isinstance(value, str):
            files: inputs.Digests = ()
            with contextlib.suppress(OSError, ValueError):  # its reader says what is wrong
                files = _files(field, str(value))
            if files:
                found[field] = FileSpec(value, _pattern(field, str(value), files), files)
    for field, spec in found.items():
        before = getattr(settings, field)
        if isinstance(before, FileSpec) and (changed := identity.difference(_one(field, before), _one(field, spec))):
            raise ValueError(
                f"{field} = {str(spec)!r}: must have the files that the run began with, but they have changed: "
                f"{changed} (to train on the new files, give the command of the run again with --overwrite)"
            )
    return dataclasses.replace(settings, **found) if found else settings


def _one(field: str, spec: FileSpec) -> dict[str, object]:
    return {field: str(spec), identity.FILES: inputs.described({field: spec})}


def _files(field: str, text: str) -> inputs.Digests:
    """The existing files that a setting names, with their digests."""
    if field == "initial":
        file = initial_file(text)
        return inputs.listed([file]) if file.is_file() else ()
    if field == "dataset" and (kept := [file for file in read_data(text).files if file.is_file()]):
        return inputs.listed(kept)
    if PATH in text or text.partition(":")[0] in LISTERS:
        return tuple(pair for part in _parts(field, text) for pair in _named(field, part))
    return ()


def _named(field: str, part: Name) -> inputs.Digests:
    """The files of one name: those that its factory lists (``input_files``), else what its option ``path`` names."""
    options = part.options
    lister = LISTERS.get(part.name)
    path = _path(options[PATH]) if PATH in options else None
    files = [] if path is None else [path]
    if lister is not None:
        files = lister(options.get(PATH))
    elif path is not None and path.is_dir() and own.own_parts({field: str(part)}):  # the package's read one file
        files = list(inputs.below(path))
    return inputs.listed([file for file in files if file.is_file()], path)


def _parts(field: str, text: str) -> list[Name]:
    names = read(field, text)
    return [*names.parts, *([] if names.clock is None else [names.clock])]


def _path(value: object) -> Path:
    with contextlib.suppress(RuntimeError):  # "~nobody": a file in the working folder may have that name
        return Path(str(value)).expanduser()
    return Path(str(value))


def _pattern(field: str, text: str, files: inputs.Digests) -> str:
    """The text with ``*`` for each option whose value is one of the files, or a folder that has one."""
    if field == "initial":
        return "*"
    above = {parent for path, _ in files for parent in (Path(path), *Path(path).parents)}
    shown = []
    for part in _parts(field, text):
        options = {key: "*" if _path(value) in above else value for key, value in part.options.items()}
        shown.append(part.name + ":" * bool(options) + ",".join(f"{key}={value}" for key, value in options.items()))
    return "+".join(shown)
