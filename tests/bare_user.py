"""A user without a home directory, as in a container that runs under a user number of its own."""

from __future__ import annotations

from pathlib import Path

import pytest


def a_bare_user(monkeypatch: pytest.MonkeyPatch, home: Path | None) -> None:
    """Set ``HOME`` to ``home``; for None unset it, and let the system know no entry of any user."""
    if home is not None:
        monkeypatch.setenv("HOME", str(home))
        return
    monkeypatch.delenv("HOME", raising=False)

    def unknown(user: int | str) -> None:
        raise KeyError(user)

    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.setattr("pwd.getpwnam", unknown)
