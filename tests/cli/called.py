"""Commands that must succeed, or be refused in one line."""

from __future__ import annotations

from fedjax_async import cli


def ok(capsys, *arguments: str) -> str:
    """Standard output of a command that must succeed and say nothing on standard error."""
    assert cli.main(arguments) == 0
    done = capsys.readouterr()
    assert done.err == ""
    return done.out


def refused(capsys, *arguments: str) -> str:
    """The one line on standard error of a command that must end with 2 and print nothing else."""
    try:
        code = cli.main(arguments)
    except SystemExit as ended:
        code = ended.code
    done = capsys.readouterr()
    assert code == 2 and done.out == "" and done.err.count("\n") == 1, (code, done)
    assert done.err.startswith("fedjax-async: error: ")
    return done.err
