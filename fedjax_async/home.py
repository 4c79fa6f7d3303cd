"""Where fetched data sets and pretrained models are kept."""

from __future__ import annotations

import os
from pathlib import Path


def default_data_dir() -> Path:
    """``$FEDJAX_ASYNC_DATA`` if set, else ``~/.cache/fedjax_async``."""
    given = os.environ.get("FEDJAX_ASYNC_DATA")
    return Path(given) if given else Path.home() / ".cache" / "fedjax_async"


def resolve_data_dir(data_dir: str | os.PathLike[str] | None) -> Path:
    """``data_dir`` as a path, the default if it is None."""
    return default_data_dir() if data_dir is None else Path(data_dir).expanduser()


def pretrained_folder(name: str, version: str, data_dir: Path) -> Path:
    """Where the files of a pretrained model belong."""
    return data_dir / "pretrained" / name / version
