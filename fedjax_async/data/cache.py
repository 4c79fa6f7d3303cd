"""The prepared arrays on disk: one ``.npy`` file a field, memory-mapped when read.

Layout: ``DATA_DIR/arrays/NAME/VERSION/{x,y,test_x,test_y[,groups]}.npy``, and the files of a pretrained model in
``DATA_DIR/pretrained/NAME/VERSION``. A folder appears in one rename.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from fedjax_async.check import require
from fedjax_async.data.published import Arrays

EXAMPLES = ("x", "test_x")


def read_cache(folder: Path, remedy: str = "fetch the data set again") -> Arrays | None:
    """Memory-mapped examples and loaded labels; None if there is no cache.

    A file that is damaged or missing is a ``ValueError`` naming it, which ends in ``remedy``.
    """
    if not folder.is_dir():
        return None
    found = {}
    for field in Arrays._fields:
        path = folder / f"{field}.npy"
        if field == "groups" and not path.exists():
            continue  # most data sets have no natural owners
        try:
            found[field] = np.load(path, mmap_mode="r" if field in EXAMPLES else None, allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
            raise ValueError(f"cache = '{path}': is damaged ({reason}); {remedy}") from error
    return Arrays(**found)


def check_cache(
    arrays: Arrays,
    folder: Path,
    remedy: str,
    *,
    shape: tuple[int, ...],
    dtype: str,
    examples: tuple[int, int],
    owned: bool = False,
) -> None:
    """``ValueError`` naming the first file whose array has another shape or type than the data set's, and ``remedy``.

    ``shape`` and ``dtype`` are those of one example, ``owned`` says whether each has a natural owner.
    """
    train, test = examples
    expected = {"x": (dtype, (train, *shape)), "y": ("int32", (train,))}
    expected |= {"test_x": (dtype, (test, *shape)), "test_y": ("int32", (test,))}
    expected |= {"groups": ("int32", (train,))} if owned else {}
    for field, (kind, sizes) in expected.items():
        array = getattr(arrays, field)
        found = "missing" if array is None else f"{array.dtype} {array.shape}"
        require(found == f"{kind} {sizes}", str(folder / f"{field}.npy"), found, f"{kind} {sizes}; {remedy}")


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
