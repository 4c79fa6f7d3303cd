"""Client data larger than memory: written to a folder of ``.npy`` files, memory-mapped, packed for each wave of jobs.

Layout: ``FOLDER/{x,y,size,test_x,test_y}.npy``, with per-client test sets also ``test_{order,offset,size}.npy``, and
``metadata.json`` (format, version, name, decoder, classes; dtype, shape, bytes and sha256 of every file). The rows of a
client are contiguous, client after client. A folder is written under a temporary name and renamed when it is complete.
Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Self, TypedDict

import numpy as np

from fedjax_async.base import check
from fedjax_async.base.check import kind as require_kind
from fedjax_async.base.check import require, whole
from fedjax_async.base.home import require_metadata
from fedjax_async.base.inputs import reading
from fedjax_async.data import decode as decoders
from fedjax_async.data.arrays import appearing, array_hash
from fedjax_async.data.checking import MOST_CLASSES, as_labels, check_fits, check_names
from fedjax_async.data.federated import Federation
from fedjax_async.data.virtual import MOST_ROWS, Identity
from fedjax_async.types import Array, FederatedData

Header = dict[str, Any]


class About(TypedDict):
    """What the metadata say of one file."""

    dtype: str
    shape: list[int]
    bytes: int
    sha256: str


class Column:
    """Writes one array to a ``.npy`` file, some rows at a time; their number need not be known. A context manager.

    The first rows set the dtype and the shape of a row.
    """

    def __init__(self, path: Path) -> None:
        self.rows = 0
        self._path, self._file = path, path.open("wb")
        self._header: Header = {}
        self._hash = hashlib.sha256()

    def __enter__(self) -> Self:
        return self

    def append(self, rows: np.ndarray) -> None:
        """Append ``rows`` [R, ...]; raises ``ValueError`` for another dtype or shape than before."""
        rows = np.asarray(rows)
        dtype = rows.dtype.newbyteorder("<")
        if not self._header:
            good = rows.ndim >= 1 and dtype.kind in "biuf"
            require(good, self._path.stem, f"{rows.dtype}{list(rows.shape)}", "rows of numbers or truth values")
            self._header = {"descr": dtype.str, "fortran_order": False, "shape": (0, *rows.shape[1:])}
            np.lib.format.write_array_header_1_0(self._file, self._header)
            self._start = self._file.tell()
        descr, item = self._header["descr"], self._header["shape"][1:]
        good = dtype.str == descr and rows.ndim >= 1 and rows.shape[1:] == item
        found = f"{rows.dtype}{list(rows.shape)}"
        require(good, self._path.stem, found, f"like the rows before, {np.dtype(descr)} of shape {item}")
        content = np.ascontiguousarray(rows, dtype)
        self._file.write(content.data)
        self._hash.update(content.data)
        self.rows += len(rows)

    def __exit__(self, *error: object) -> None:
        try:
            if self._header:  # NumPy leaves room in the header for a longer first axis
                self._file.seek(0)
                self._header["shape"] = (self.rows, *self._header["shape"][1:])
                np.lib.format.write_array_header_1_0(self._file, self._header)
                require(self._file.tell() == self._start, self._path.stem, "its header", f"{self._start} bytes long")
        finally:
            self._file.close()

    def about(self) -> About:
        """What :func:`open_column` compares: dtype, shape, bytes of the file and sha256 of the values."""
        h = self._header
        return {
            "dtype": np.dtype(h["descr"]).name,
            "shape": list(h["shape"]),
            "bytes": self._path.stat().st_size,
            "sha256": self._hash.hexdigest(),
        }


def open_column(path: Path, about: About) -> np.ndarray:
    """The memory-mapped array of a file; raises ``ValueError`` if missing or different from ``about``, its metadata."""
    found = path.stat().st_size if path.is_file() else None
    require(found == about["bytes"], str(path), found, f"{about['bytes']} bytes long, as its metadata say")
    mode: Literal["r"] | None = "r" if 0 not in about["shape"] else None  # an empty array cannot be mapped
    try:
        array: np.ndarray = np.load(reading(path), mmap_mode=mode, allow_pickle=False)
    except (OSError, EOFError, ValueError) as error:
        raise ValueError(f"'{path}': must be a NumPy file of numbers ({str(error).splitlines()[0]})") from error
    is_as_stated = array.dtype.name == about["dtype"] and list(array.shape) == about["shape"]
    stated = f"{about['dtype']}{about['shape']}, as its metadata say"
    require(is_as_stated and array.flags.c_contiguous, str(path), f"{array.dtype}{list(array.shape)}", stated)
    return array


FORMAT, VERSION = "fedjax_async clients", 1
CHUNK = 64 * 2**20  # bytes of x that are written at once
FIELDS = ("x", "y", "size", "test_x", "test_y")
OWN_TESTS = ("test_order", "test_offset", "test_size")

AnyPath = str | os.PathLike[str]
Decode = Callable[[Array], Array]
Chunk = tuple[np.ndarray, np.ndarray, np.ndarray]  # x [R, ...], y [R, ...], and client sizes that sum to R


def write_clients(
    folder: AnyPath,
    chunks: Iterable[Chunk],
    *,
    test_x: np.ndarray,
    test_y: np.ndarray,
    decode: Decode = decoders.as_is,
    num_classes: int | None = None,
    name: str = "clients",
    client_names: Sequence[str] | None = None,
    **own_tests: np.ndarray,
) -> Path:
    """Write clients to a new folder for :func:`open_folder`, chunk by chunk; only one chunk is in memory.

    Args:
      chunks: ``(x, y, size)`` of any number of whole clients: x [R, ...], y [R, ...] and size int[n] with sum R.
      test_x, test_y: the global test set, [T, ...].
      decode: stored by name if it is in ``data.decode``; any other must be given again to :func:`open_folder`.
      num_classes: ``None`` if y is not a class.
      name: the name of the data in settings and results.
      client_names: one for each client, for tables and pictures.
      own_tests: ``test_order``, ``test_offset`` and ``test_size`` of ``FederatedData``, all three or none.

    Returns the folder. Raises ``ValueError`` if it exists, if chunks do not fit together, or for 2^31 examples or more.
    """
    folder = check.path("folder", folder)
    if num_classes is not None:
        whole("num_classes", num_classes, high=MOST_CLASSES)
    require(not folder.exists(), "folder", str(folder), "a folder that does not exist yet")
    require(len(test_x) == len(test_y), "test_y", f"{len(test_y)} targets", f"{len(test_x)}, one for each of test_x")
    allowed = f"{', '.join(OWN_TESTS)}, or none"
    require(set(own_tests) in (set(), set(OWN_TESTS)), "own_tests", sorted(own_tests), allowed)
    with appearing(folder) as temporary:
        sizes: list[np.ndarray] = []
        files: dict[str, About] = {}
        with Column(temporary / "x.npy") as column_x, Column(temporary / "y.npy") as column_y:
            for x, y, size in chunks:
                sizes.append(_check_chunk(x, y, size, num_classes))
                column_x.append(x)
                column_y.append(y)
                allowed = f"at most {MOST_ROWS}, since rows are numbered by int32"
                require(column_x.rows <= MOST_ROWS, "chunks", f"{column_x.rows} examples or more", allowed)
        require(len(sizes) > 0, "chunks", "none", "at least one chunk of clients")
        files |= {"x": column_x.about(), "y": column_y.about()}
        whole_arrays = {"size": np.concatenate(sizes), "test_x": test_x, "test_y": test_y, **own_tests}
        for field, array in whole_arrays.items():
            with Column(temporary / f"{field}.npy") as column:
                column.append(np.asarray(array))
            files[field] = column.about()
        metadata = {"format": FORMAT, "version": VERSION, "name": name, "num_classes": num_classes}
        known = (known for known, function in decoders.DECODERS.items() if function is decode)
        metadata |= {"decode": next(known, None), "files": files}
        if client_names is not None:
            check_names("client_names", client_names, files["size"]["shape"][0])
            metadata["client_names"] = list(client_names)
        (temporary / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
    return folder


def write_folder(folder: AnyPath, data: FederatedData) -> Path:
    """Write ``FederatedData`` to a new folder, client after client; virtual arrays are computed. Returns the folder.

    For a ``Dataset``: ``write_folder(folder, federate(dataset, "dirichlet:alpha=0.1", 1000))``. Raises ``ValueError``
    as :func:`write_clients`, and for data with validation parts, which a folder does not keep.
    """
    require_kind("data", data, FederatedData, "FederatedData, made by data.federate or data.from_arrays")
    kept = data.validation_size is None or not np.any(data.validation_size)
    require(kept, "data.validation_size", "given", "left out: a folder keeps no validation parts of clients")
    tests = {} if data.test_order is None else {field: getattr(data, field) for field in OWN_TESTS}
    return write_clients(
        folder, _chunks(data), test_x=data.test_x, test_y=data.test_y, decode=data.decode,
        num_classes=data.num_classes, name=data.name, client_names=data.client_names, **tests,
    )  # fmt: skip


def open_folder(folder: AnyPath, *, decode: Decode | None = None, verify: bool = False) -> FederatedData:
    """The clients in a folder as ``FederatedData``: x and y memory-mapped, other arrays loaded, ``streamed`` true.

    ``decode``: needed if the folder was written with a function that is not in ``data.decode``. Types, shapes and
    lengths of all files are compared with the metadata. With ``verify``, so are their contents, which reads every file.
    Raises ``ValueError`` for anything that is missing, cut short, altered or of another format.
    """
    folder = check.path("folder", folder)
    metadata = _read_metadata(folder)
    if decode is None:
        known = metadata["decode"]
        require(known in decoders.DECODERS, f"{folder}: decode", known, "given as decode=...: it is not in data.decode")
        decode = decoders.DECODERS[known]
    arrays = {field: open_column(folder / f"{field}.npy", about) for field, about in metadata["files"].items()}
    if verify:
        for field, array in arrays.items():
            good = array_hash(array) == metadata["files"][field]["sha256"]
            require(good, f"{folder}: {field}", "other contents than were written", "unaltered (sha256)")
    x, y = arrays.pop("x"), arrays.pop("y")
    size, test_x, test_y = (np.array(arrays.pop(field)) for field in FIELDS[2:])
    good = size.dtype == np.int32 and size.ndim == 1 and len(size) > 0 and size.min() >= 1
    good = good and int(size.sum(dtype=np.int64)) == len(x) == len(y) and len(test_x) == len(test_y)
    require(bool(good), f"{folder}: size", f"{size.dtype}{list(size.shape)}", f"sizes >= 1 of {len(x)} examples in all")
    names = metadata.get("client_names")
    if names is not None:
        check_names(f"{folder}: client_names", names, len(size))
    return FederatedData(
        metadata["name"], x, y, Identity((len(x),)), (np.cumsum(size) - size).astype(np.int32), size, test_x, test_y,
        decode=decode, num_classes=metadata["num_classes"], streamed=True, client_names=names,
        **{field: np.array(array) for field, array in arrays.items()},
    )  # fmt: skip


def folder(*, path: str) -> Federation:
    """Clients streamed from a folder of memory-mapped arrays, of any size; natural clients: folder:path=DIR.

    The folder must come from ``data.write_folder`` or ``data.write_clients``. A run with fewer clients than the folder
    has uses the first ones; more clients raise ``ValueError``.
    """
    data = open_folder(str(path))

    def deal(num_clients: int | None, seed: int) -> FederatedData:
        del seed  # nothing is drawn at random: the folder has its clients
        if num_clients is None or num_clients == len(data.size):
            return data
        whole("num_clients", num_clients, 1, len(data.size))
        names = None if data.client_names is None else data.client_names[:num_clients]
        fewer = data._replace(offset=data.offset[:num_clients], size=data.size[:num_clients], client_names=names)
        if data.test_order is None or data.test_offset is None or data.test_size is None:
            return fewer
        test_size = data.test_size[:num_clients]
        return fewer._replace(
            test_order=data.test_order[spans(data.test_offset[:num_clients], test_size)],
            test_offset=(np.cumsum(test_size) - test_size).astype(np.int32),
            test_size=test_size,
        )

    return Federation(data.name, deal)


def _check_chunk(x: np.ndarray, y: np.ndarray, size: np.ndarray, num_classes: int | None) -> np.ndarray:
    """The sizes as int32[n]; raises ``ValueError`` for an inconsistent chunk."""
    size, y = np.asarray(size), np.asarray(y)
    good = size.ndim == 1 and len(size) > 0 and np.issubdtype(size.dtype, np.integer) and bool(size.min() >= 1)
    require(good, "size", f"{size.dtype}{list(size.shape)}", "one whole number >= 1 per client")
    total = int(size.sum(dtype=np.int64))
    allowed = f"the number of examples, {len(x)} in x and {len(y)} in y"
    require(total == len(x) == len(y), "size", f"{total} in all", allowed)
    if num_classes is not None:
        require(np.issubdtype(y.dtype, np.integer), "y", y.dtype.name, f"integer labels in [0, {num_classes})")
        as_labels("y", y, num_classes)
    for name, array in (("x", x), ("y", y)):
        check_fits(name, array)
    return size.astype(np.int32)


def _chunks(data: FederatedData) -> Iterator[Chunk]:
    """Yield whole clients, about ``CHUNK`` bytes of x at a time."""
    row = max(1, int(np.prod(data.x.shape[1:])) * np.dtype(data.x.dtype).itemsize)
    last = np.cumsum(data.size, dtype=np.int64)
    first = 0
    while first < len(last):
        done = last[first] - data.size[first]
        after = max(first + 1, int(np.searchsorted(last, done + CHUNK // row, "right")))
        size = data.size[first:after]
        rows = data.order[spans(data.offset[first:after], size)]
        yield np.asarray(data.x[rows]), np.asarray(data.y[rows]), size
        first = after


def _read_metadata(folder: Path) -> dict[str, Any]:
    """The checked contents of ``metadata.json``."""
    file = require_metadata(folder)
    try:
        metadata = json.loads(reading(file).read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"folder = '{folder}': must contain clients' data and a metadata.json ({error})") from error
    kind = metadata.get("format") if isinstance(metadata, dict) else None
    require(kind == FORMAT, f"{file}: format", kind, repr(FORMAT))
    require(metadata.get("version") == VERSION, f"{file}: version", metadata.get("version"), str(VERSION))
    good = isinstance(metadata.get("name"), str) and isinstance(metadata.get("decode"), (str, type(None)))
    classes = metadata.get("num_classes", "")
    good = good and (classes is None or (type(classes) is int and classes >= 1))
    require(good, f"{file}: name, decode, num_classes", "missing or of another type", "as they were written")
    files = metadata.get("files")
    good = isinstance(files, dict) and set(files) in (set(FIELDS), {*FIELDS, *OWN_TESTS})
    good = good and all(_is_described(about) for about in files.values())
    require(good, f"{file}: files", "missing or of another form", "dtype, shape, bytes and sha256 of every file")
    return metadata


def _is_described(about: object) -> bool:
    kinds = {"dtype": str, "shape": list, "bytes": int, "sha256": str}
    return isinstance(about, dict) and all(isinstance(about.get(key), kind) for key, kind in kinds.items())


def spans(offset: np.ndarray, size: np.ndarray) -> np.ndarray:
    """The ranges ``offset[i] .. offset[i] + size[i] - 1`` of all i, concatenated; int64[sum of sizes].

    >>> spans(np.array([10, 3]), np.array([2, 3])).tolist()
    [10, 11, 3, 4, 5]
    """
    size = np.asarray(size, np.int64)
    before = np.cumsum(size) - size
    return np.repeat(offset - before, size) + np.arange(int(size.sum()))


def packed_offsets(data: FederatedData, clients: np.ndarray) -> np.ndarray:
    """The offsets of ``clients`` in the result of :func:`pack`, computed without reading any example; int32[W].

    >>> from fedjax_async.data.embedded import fashion_mnist_6k
    >>> from fedjax_async.data.federated import federate
    >>> data = federate(fashion_mnist_6k(), "iid", num_clients=10)
    >>> packed_offsets(data, np.array([7, 2, 2])).tolist()
    [1000, 0, 500]
    """
    by_offset, size = _in_disk_order(data, clients)
    offset = np.empty(len(by_offset), np.int32)
    offset[by_offset] = np.cumsum(size) - size
    return offset


def pack(data: FederatedData, clients: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Copy the examples of ``clients`` from the pool: ``(x [rows, ...], y [rows, ...], offset int32[W])``.

    Args:
      clients: int[W], in any order, repeats allowed.
      rows: length of the result, at least the sum of the clients' sizes; unused rows at the end are zero.

    Row ``offset[i] + j`` is the j-th example of ``clients[i]``. With ``order = Identity((rows,))`` the result is
    ``ClientData`` like any other. Clients are read and stored in their order on the disk. Raises ``ValueError`` for
    too few ``rows`` and for clients that do not exist.
    """
    by_offset, size = _in_disk_order(data, clients)
    source = data.order[spans(data.offset[np.asarray(clients)[by_offset]], size)]
    total = len(source)
    require(total <= rows <= MOST_ROWS, "rows", rows, f"from {total}, the sum of these clients' sizes, to {MOST_ROWS}")
    x, y = (np.empty((rows, *pool.shape[1:]), pool.dtype) for pool in (data.x, data.y))
    for copy, pool in ((x, data.x), (y, data.y)):
        np.take(pool, source, axis=0, out=copy[:total], mode="clip")  # mode="raise" would cost a second copy
        copy[total:] = 0
    return x, y, packed_offsets(data, clients)


def _in_disk_order(data: FederatedData, clients: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Indices that sort ``clients`` by their offset, int64[W], and their sizes in that order, int64[W]."""
    clients = np.asarray(clients)
    good = clients.ndim == 1 and np.issubdtype(clients.dtype, np.integer)
    good = good and (len(clients) == 0 or 0 <= clients.min() <= clients.max() < len(data.size))
    require(bool(good), "clients", f"{clients.dtype}{list(clients.shape)}", f"numbers of {len(data.size)} clients")
    by_offset = np.argsort(data.offset[clients], kind="stable")
    return by_offset, data.size[clients[by_offset]].astype(np.int64)
