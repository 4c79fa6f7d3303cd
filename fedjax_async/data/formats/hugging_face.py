"""Folders that Hugging Face's ``datasets`` writes with ``save_to_disk``: the columns of their Arrow files, by split.

A data set is a folder with ``state.json``, which names its Arrow files. A ``DatasetDict`` is a folder with
``dataset_dict.json``, which names the folders of its splits. The package ``datasets`` is not needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedjax_async.base.check import require
from fedjax_async.base.factories import takes
from fedjax_async.base.inputs import reading
from fedjax_async.data.federated import Dataset
from fedjax_async.data.formats.clients import existing, read_json
from fedjax_async.data.formats.tables import (
    ReadColumns,
    Rows,
    arrow,
    dataset_of,
    read_columns,
    require_columns,
    rows_of,
)

STATE, SPLITS = "state.json", "dataset_dict.json"  # in the folder of a data set without splits, with splits
FILE_FORMAT = b"ARROW1"  # a file in Arrow's file format begins with these bytes; others are in its stream format


@takes(columns=read_columns)
def hugging_face(
    *, path: str, train: str = "train", test: str = "test", client: str | None = None, columns: ReadColumns
) -> Dataset:
    """Folders of Hugging Face's datasets (save_to_disk): hugging_face:path=DIR,x=image,y=label,client=writer.

    ``train``, ``test``: names of splits; a folder without splits has no test set. Other options as for ``parquet``.

    Raises ``ValueError`` naming file, column and row. Needs pyarrow (extra ``formats``), and Pillow for images.
    """
    columns = columns._replace(client=client)
    root = existing(path)
    parts = splits(root, (train, test), columns)
    require(train in parts, f"'{root}': split", train, "one of those in dataset_dict.json")
    return dataset_of(root.name, parts[train], parts.get(test, []), columns)


def splits(folder: Path, names: tuple[str, str], columns: ReadColumns) -> dict[str, list[Rows]]:
    """Those of the splits ``names`` that the folder has; a folder without splits counts as the first of them."""
    if not is_split(folder):
        return {names[0]: read(folder, columns)}
    known = split_names(folder)
    return {name: read(_inside(folder, name), columns) for name in names if name in known}


def is_data_set(folder: Path) -> bool:
    """Whether save_to_disk wrote the folder, with or without splits."""
    return is_split(folder) or (folder / STATE).is_file()


def is_split(folder: Path) -> bool:
    """Whether the folder has splits."""
    return (folder / SPLITS).is_file()


def split_names(folder: Path) -> list[str]:
    """The names of the splits of a folder with splits."""
    content = read_json(folder / SPLITS)
    known = content.get("splits") if isinstance(content, dict) else None
    good = isinstance(known, list) and all(isinstance(name, str) for name in known)
    require(good, f"'{folder / SPLITS}': splits", known, "a list of names")
    return list(known or ())


def read(folder: Path, columns: ReadColumns) -> list[Rows]:
    """The columns of all Arrow files of one data set, in order."""
    state = folder / STATE
    require(state.is_file(), "path", str(folder), "a folder that save_to_disk wrote, with a state.json")
    content = read_json(state)
    listed = content.get("_data_files") if isinstance(content, dict) else None
    good = isinstance(listed, list) and bool(listed) and all(isinstance(_name(one), str) for one in listed)
    require(good, f"'{state}': _data_files", listed, "a list of objects with a filename")
    indices = content.get("_indices_data_files") or content.get("_indices_files")
    require(not indices, f"'{state}'", "an indices mapping", "saved after flatten_indices()")
    return [read_arrow(_inside(folder, _name(one)), columns) for one in listed or ()]


def _name(entry: object) -> Any:
    return entry.get("filename") if isinstance(entry, dict) else None


def _inside(folder: Path, name: str) -> Path:
    """A file or folder directly in ``folder``; raises ``ValueError`` for a name that leads elsewhere."""
    plain = name == Path(name).name and name not in ("", ".", "..")
    require(plain and (folder / name).exists(), f"'{folder}': file", name, "a name within the folder that exists")
    return folder / name


def read_arrow(file: Path, columns: ReadColumns) -> Rows:
    """The columns of an Arrow file in either format; raises ``ValueError`` if it is damaged or lacks a column."""
    pa = arrow()
    try:
        with pa.memory_map(str(reading(file))) as source:
            head = source.read(len(FILE_FORMAT))
            source.seek(0)
            is_file = head == FILE_FORMAT
            options = pa.ipc.IpcReadOptions()
            reader = (pa.ipc.open_file if is_file else pa.ipc.open_stream)(source, options=options)
            require_columns(file, reader.schema, columns)
            chosen = [reader.schema.get_field_index(name) for name in columns.names]
            options = pa.ipc.IpcReadOptions(included_fields=chosen)
            source.seek(0)
            reader = (pa.ipc.open_file if is_file else pa.ipc.open_stream)(source, options=options)
            table = reader.read_all()
            table.validate(full=True)
            return rows_of(file, table, columns)
    except (pa.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())[:100]
        raise ValueError(f"'{file}': must be an Arrow file ({reason})") from error
