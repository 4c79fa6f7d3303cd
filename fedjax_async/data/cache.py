"""The prepared arrays on disk: one ``.npy`` file a field, memory-mapped when read.

Layout: ``DATA_DIR/arrays/NAME/VERSION/{x,y,test_x,test_y[,groups]}.npy``, and the files of a pretrained model in
``DATA_DIR/pretrained/NAME/VERSION``. A folder appears in one rename.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from fedjax_async.data.published import Arrays


def default_data_dir() -> Path:
    """``$FEDJAX_ASYNC_DATA`` if set, else ``~/.cache/fedjax_async``."""
    given = os.environ.get("FEDJAX_ASYNC_DATA")
    return Path(given) if given else Path.home() / ".cache" / "fedjax_async"


def resolve_data_dir(data_dir: str | os.PathLike[str] | None) -> Path:
    """``data_dir`` as a path, the default if it is None."""
    return default_data_dir() if data_dir is None else Path(data_dir).expanduser()


def cache_folder(name: str, version: str, data_dir: Path) -> Path:
    """Where the arrays of a data set belong."""
    return data_dir / "arrays" / name / version


def pretrained_folder(name: str, version: str, data_dir: Path) -> Path:
    """Where the files of a pretrained model belong."""
    return data_dir / "pretrained" / name / version


def read_cache(folder: Path) -> Arrays | None:
    """Memory-mapped examples and loaded labels; None if there is no cache; ``ValueError`` if it is damaged."""
    if not folder.is_dir():
        return None
    try:
        x, test_x = (np.load(folder / f"{field}.npy", mmap_mode="r", allow_pickle=False) for field in ("x", "test_x"))
        y, test_y = (np.load(folder / f"{field}.npy", allow_pickle=False) for field in ("y", "test_y"))
        owned = (folder / "groups.npy").exists()
        groups = np.load(folder / "groups.npy", allow_pickle=False) if owned else None
    except (OSError, ValueError, EOFError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"cache = '{folder}': is damaged ({reason}); fetch the data set again") from error
    return Arrays(x, y, test_x, test_y, groups)


def write_cache(arrays: Arrays, folder: Path) -> Path:
    """Write all arrays, then rename the folder into place, replacing an older one. Returns the folder."""
    with appearing(folder) as temporary:
        for field, array in arrays.present().items():
            np.save(temporary / f"{field}.npy", np.ascontiguousarray(array), allow_pickle=False)
        if folder.exists():
            shutil.rmtree(folder)
    return folder


def write_files(files: Mapping[str, bytes], folder: Path) -> Path:
    """Write files as they are, then rename the folder into place, replacing an older one. Returns the folder."""
    with appearing(folder) as temporary:
        for name, content in files.items():
            (temporary / name).write_bytes(content)
        if folder.exists():
            shutil.rmtree(folder)
    return folder


@contextlib.contextmanager
def appearing(folder: Path) -> Iterator[Path]:
    """A temporary folder beside ``folder``, renamed to it at the end of the block, or removed after an error."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        temporary.chmod(0o755)
        yield temporary
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
