"""Small files and folders in the layouts of other projects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fedjax_async.data import Dataset, load
from tests.data.small_mnist import image_bytes
from tests.told import refusal

MARK = "\ufeff".encode()  # the byte order mark
RNG = np.random.default_rng(0)


def owners(data: Dataset) -> list[list[int]]:
    """The training labels of each natural client."""
    assert data.groups is not None
    return [data.y[data.groups == owner].tolist() for owner in range(data.groups.max() + 1)]


def read(folder: Path, spec: str, content: bytes | str | dict[str, Any]) -> Dataset:
    """What a spec makes of the last file that it names, of these bytes, text or columns; ``HERE`` is the folder."""
    path = folder / spec.rpartition("HERE/")[2].partition(",")[0]
    if isinstance(content, dict):
        pq.write_table(pa.table(content), path)
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return load(spec.replace("HERE", str(folder)))


def refused(spec: str, message: str) -> None:
    said = refusal(load, spec)
    assert message in said, said


def leaf_file(path: Path, users: dict[str, Any], **changes: Any) -> None:
    """A file of LEAF with what each user has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"users": list(users), "num_samples": [len(own["y"]) for own in users.values()], "user_data": users}
    path.write_text(json.dumps(content | changes))


def h5_file(path: Path, clients: dict[str, Any]) -> Path:
    """A file of TFF with the features of each client."""
    import h5py

    with h5py.File(path, "w") as file:
        for client, features in clients.items():
            for name, values in features.items():
                file.create_dataset(f"examples/{client}/{name}", data=values)
    return path


def images_table(labels: list[int], clients: Any) -> tuple[pa.Table, np.ndarray]:
    """A table as ``datasets`` writes it: images as structs of bytes and path, class names in the schema."""
    pixels = RNG.integers(0, 256, (len(labels), 6, 5, 3), dtype=np.uint8)
    structs = [{"bytes": image_bytes(one), "path": None} for one in pixels]
    image = pa.array(structs, pa.struct({"bytes": pa.binary(), "path": "string"}))
    columns = {"label": pa.array(labels, pa.int64()), "writer": clients, "unread": [None] * len(labels)}
    features = {"label": {"names": ["a", "b", "c"], "_type": "ClassLabel"}}
    schema = {"huggingface": json.dumps({"info": {"features": features}})}
    return pa.table({"image": image} | columns).replace_schema_metadata(schema), pixels


def saved(folder: Path, table: pa.Table, *, as_file: bool = False, state: Any = None) -> Path:
    """A folder as ``Dataset.save_to_disk`` writes it."""
    folder.mkdir(parents=True)
    name = "data-00000-of-00001.arrow"
    with (pa.ipc.new_file if as_file else pa.ipc.new_stream)(str(folder / name), table.schema) as writer:
        writer.write_table(table)
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text(json.dumps(state or {"_data_files": [{"filename": name}], "_fingerprint": "0"}))
    return folder


def saved_splits(folder: Path, splits: tuple[str, ...] = ("train", "test"), **tables: pa.Table) -> Path:
    """A folder as ``DatasetDict.save_to_disk`` writes it."""
    for name, table in tables.items():
        saved(folder / name, table, as_file=name == "test")
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": splits}))
    return folder
