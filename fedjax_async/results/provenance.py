"""What a run was computed with: versions, source revision and device kind, but neither time nor host name."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from pathlib import Path

import jax

PACKAGES = ("fedjax-async", "jax", "jaxlib", "flax", "optax", "numpy")


def _package_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:  # run from a source tree that was never installed
        return None


def revision() -> str | None:
    """The commit this package's source was at, with ``-dirty`` if it was edited since; None outside git."""
    folder = Path(__file__).resolve().parent
    # An installed copy may lie inside somebody else's repository: only a tracked file speaks for ours.
    tracked = ["git", "-C", str(folder), "ls-files", "--error-unmatch", Path(__file__).name]
    describe = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        subprocess.run(tracked, capture_output=True, check=True)
        return subprocess.run(describe, capture_output=True, check=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def versions() -> dict[str, str | int | None]:
    """Python, package and device versions, as ``versions.json`` holds them."""
    devices = jax.devices()
    return {
        "python": platform.python_version(),
        **{name: _package_version(name) for name in PACKAGES},
        "revision": revision(),
        "backend": devices[0].platform,
        "device": devices[0].device_kind,
        "devices": len(devices),
    }
