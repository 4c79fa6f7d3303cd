"""Two checkouts of the package side by side: does a user get the same? Files, error messages, and the way of a run.

    git worktree add ../before HEAD~1
    python experiments/benchmarks/outcomes.py --before ../before                # about ten minutes on 2 cores
    python experiments/benchmarks/outcomes.py --before ../before --parts messages way
    python experiments/benchmarks/outcomes.py --before ../before --cases krum pushcen --keep FOLDER
    python experiments/benchmarks/outcomes.py --smoke                           # does it run

Each checkout has processes of its own, one for each part, on a CPU; only the public interface is used, so the same
cases drive both.

- ``settings``: forty settings (``outcomes_cases.py``), run by ``simulate``, some also as a sweep, a comparison or a
  command. All files are compared, bit for bit. Left out are the package's version and commit, digests of files that
  hold these, and seconds in printed texts. The columns ``programs`` have the number of compiled programs. Each case
  begins without any; its other ways may use those of the first.
- ``messages``: wrong calls and commands (``outcomes_messages.py``): type and text of the errors, exit codes and what is
  printed. Those that are no ``ValueError`` or exit code 2 are marked.
- ``way``: the files and functions of the package that run from ``simulate`` to the first local step
  (``outcomes_way.py``): in a process's first run and in the same run once more. Then, for three parameters, those that
  have the value in a variable.

The exit code is 1 if files or messages differ. ``--out`` gets a table for each part.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from checkout_worker import Worker
from common import save_table
from outcomes_files import differences

PARTS = ("settings", "messages", "way")
COMPILED = "/jax/core/compile/backend_compile_duration"
SAID = "said.txt"  # what a run printed and warned of, beside its files
SMOKE_CASES, SMOKE_MESSAGES = ["fedasync", "pushcen"], 5
EXPECTED = ("ValueError", "exit 2")

# --- the process of a checkout ------------------------------------------------------------------------


def run_case(name: str, way: str, folder: Path, inputs: Path, *, first: bool) -> dict[str, Any]:
    """Run a case in one of its ways; its printed texts and warnings are kept beside its files."""
    import outcomes_cases  # noqa: PLC0415 (it imports the checkout's package)

    compiled = 0

    def listen(event: str, duration_secs: float, **more: Any) -> None:
        nonlocal compiled
        del duration_secs, more
        compiled += event == COMPILED

    if first:
        jax.clear_caches()
    jax.monitoring.register_event_duration_secs_listener(listen)
    out, began, error = io.StringIO(), time.perf_counter(), ""
    try:
        with warnings.catch_warnings(record=True) as warned, contextlib.redirect_stdout(out):
            warnings.simplefilter("always")
            with contextlib.redirect_stderr(out):
                outcomes_cases.run(name, way, folder, inputs)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    lines = [out.getvalue(), *(f"{one.category.__name__}: {one.message}" for one in warned), error]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SAID).write_text("\n".join(lines), encoding="utf-8")
    return {"programs": compiled, "seconds": time.perf_counter() - began, "error": error}


def answer(do: str, given: Mapping[str, Any], inputs: Path) -> Any:
    """The answer to a request."""
    if do == "way":
        import outcomes_way  # noqa: PLC0415

        return outcomes_way.measure(given["what"])
    if do == "message":
        import outcomes_messages  # noqa: PLC0415

        return outcomes_messages.said(given["name"], inputs)
    return run_case(given["name"], given["way"], Path(given["folder"]), inputs, first=given["first"])


def names(part: str, inputs: Path) -> Any:
    """The runs of a part, or its messages; their input files are written."""
    if part == "settings":
        import outcomes_cases  # noqa: PLC0415
        import outcomes_own  # noqa: PLC0415

        outcomes_own.write_inputs(inputs)
        return list(outcomes_cases.runs())
    import outcomes_messages  # noqa: PLC0415

    outcomes_messages.write_inputs(inputs)
    return list(outcomes_messages.CALLS)


def work(checkout: Path, inputs: Path) -> None:
    """Answer requests, one JSON object per line."""
    answers, sys.stdout = sys.stdout, sys.stderr
    import fedjax_async  # noqa: PLC0415

    assert Path(fedjax_async.__file__).is_relative_to(checkout), f"{fedjax_async.__file__} is not in {checkout}"
    for line in sys.stdin:
        request = json.loads(line)
        do = request.pop("do")
        found = names(request["part"], inputs) if do == "names" else answer(do, request, inputs)
        print(json.dumps(found), file=answers, flush=True)


def started(checkout: Path, place: Path, inputs: Path) -> Worker:
    """A process of one checkout; its working directory is an empty folder."""
    place.mkdir(parents=True)
    script = [str(Path(__file__).resolve()), "--worker", str(checkout.resolve()), str(inputs)]
    data = str(inputs / "data")
    return Worker(checkout, script, place, JAX_ENABLE_COMPILATION_CACHE="false", FEDJAX_ASYNC_DATA=data, COLUMNS="120")


@contextlib.contextmanager
def both(a: argparse.Namespace, part: str, folder: Path, inputs: Path) -> Iterator[dict[str, Worker]]:
    """A process of each checkout, for one part."""
    made = {
        version: started(checkout, folder / "work" / f"{part}-{version}", inputs)
        for version, checkout in (("before", a.before), ("after", a.after))
    }
    try:
        yield made
    finally:
        for worker in made.values():
            worker.end()


def first_of(workers: Mapping[str, Worker], part: str) -> Any:
    """What a part has; both processes are asked, so that both are ready."""
    return next(iter([worker.ask(do="names", part=part) for worker in workers.values()]))


# --- the parts ----------------------------------------------------------------------------------------


def judge_settings(a: argparse.Namespace, folder: Path, inputs: Path) -> tuple[list[dict[str, Any]], bool]:
    """Run all cases in both checkouts and compare their files."""
    rows: list[dict[str, Any]] = []
    with both(a, "settings", folder, inputs) as workers:
        todo = first_of(workers, "settings")
        unknown = {*(a.cases or [])} - {name for name, _ in todo}
        if unknown:
            raise SystemExit(f"--cases {' '.join(sorted(unknown))}: unknown ({' '.join(dict(todo))})")
        for name, way in todo:
            if (a.cases and name not in a.cases) or (a.smoke and way != "simulate"):
                continue
            places = {version: folder / version / name / way for version in workers}
            asked = {"do": "run", "name": name, "way": way, "first": not rows or rows[-1]["case"] != name}
            done = {v: worker.ask(**asked, folder=str(places[v])) for v, worker in workers.items()}
            row = {"case": name, "way": way, **differences(places["before"], places["after"], a.ignore)}
            if errors := {one["error"] for one in done.values()} - {""}:
                row["result"] = f"failed: {' | '.join(sorted(errors))}"
            row |= {f"programs {version}": one["programs"] for version, one in done.items()}
            row |= {f"seconds {version}": round(one["seconds"], 2) for version, one in done.items()}
            rows.append(row)
            counts = " ".join(str(row[f"{what} {version}"]) for what in ("programs", "seconds") for version in workers)
            print(f"{name:20} {way:9} {counts:20} {row['result']} {row['largest'] or ''}", flush=True)
    equal = sum(row["result"] == "equal" for row in rows)
    programs = sum(row["programs before"] == row["programs after"] for row in rows)
    seconds = " and ".join(f"{sum(row[f'seconds {version}'] for row in rows):.0f}" for version in ("before", "after"))
    print(f"\nsettings: {equal} of {len(rows)} runs equal, {programs} with as many programs, {seconds} s\n", flush=True)
    return rows, equal == len(rows)


def cleaned(text: str, a: argparse.Namespace, folder: Path) -> str:
    """A message without addresses and folders."""
    text = re.sub(r"0x[0-9a-f]{6,}", "0xADDRESS", text)
    for path, word in ((folder, "FOLDER"), (a.before.resolve(), "CHECKOUT"), (a.after.resolve(), "CHECKOUT")):
        text = text.replace(str(path), word)
    return text


def judge_messages(a: argparse.Namespace, folder: Path, inputs: Path) -> tuple[list[dict[str, Any]], bool]:
    """Make all wrong calls in both checkouts and print the messages that differ."""
    rows: list[dict[str, Any]] = []
    with both(a, "messages", folder, inputs) as workers:
        todo = first_of(workers, "messages")
        began = time.perf_counter()
        for name in todo[:: len(todo) // SMOKE_MESSAGES][:SMOKE_MESSAGES] if a.smoke else todo:
            row: dict[str, Any] = {"message": name}
            for version, worker in workers.items():
                kind, text = worker.ask(do="message", name=name)
                row |= {f"type {version}": kind, f"text {version}": cleaned(text, a, folder)}
            row["equal"] = all(row[f"{what} before"] == row[f"{what} after"] for what in ("type", "text"))
            row["marked"] = any(row[f"type {version}"] not in EXPECTED for version in workers)
            rows.append(row)
            if not row["equal"] or row["marked"]:
                print(f"{name}{' (marked)' * row['marked']}{' (equal)' * row['equal']}")
                for version in workers:
                    print(f"    {version:6} {row[f'type {version}']}: {row[f'text {version}']}", flush=True)
    equal, marked = (sum(row[column] for row in rows) for column in ("equal", "marked"))
    seconds = time.perf_counter() - began
    print(f"messages: {equal} of {len(rows)} equal, {marked} marked, {seconds:.0f} s for both\n", flush=True)
    return rows, equal == len(rows)


def judge_way(a: argparse.Namespace, folder: Path, inputs: Path) -> tuple[list[dict[str, Any]], bool]:
    """Count files and functions of the way in both checkouts."""
    found: dict[str, dict[str, dict[str, int]]] = {"before": {}, "after": {}}
    for what in ("runs", "values"):  # in processes of their own, because what was computed once is remembered
        with both(a, f"way-{what}", folder, inputs) as workers:
            for version, worker in workers.items():
                found[version] |= worker.ask(do="way", what=what)
    rows = [
        {"way": name}
        | {f"{what} {v}": found[v][name][what] for what in ("files", "functions", "code objects") for v in found}
        for name in found["before"]
    ]
    for row in rows:
        counts = (
            f"{row[f'{what} before']:4} -> {row[f'{what} after']:4} {what}"
            for what in ("files", "functions", "code objects")
        )
        print(f"{row['way']:16} {'   '.join(counts)}")
    print(flush=True)
    return rows, True


JUDGES = {"settings": judge_settings, "messages": judge_messages, "way": judge_way}


def main() -> None:
    """Parse, compare part by part, write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = Path(__file__).resolve().parents[2]
    parser.add_argument("--before", type=Path, default=here, help="the other checkout [this one, compared with itself]")
    parser.add_argument("--after", type=Path, default=here, help="the checkout to judge [this one]")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--cases", nargs="+", default=None, metavar="CASE", help="only these settings [all]")
    parser.add_argument(
        "--ignore", nargs="+", default=[], metavar="TEXT", help="columns with such a name, e.g. own.method, may differ"
    )
    parser.add_argument("--keep", type=Path, default=None, help="a new folder for all files [a temporary one]")
    parser.add_argument("--out", type=Path, default=None, help="folder of tables [runs/outcomes]")
    parser.add_argument("--smoke", action="store_true", help="two settings, five messages, the way")
    parser.add_argument("--worker", nargs=2, type=Path, default=None, help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.worker:
        work(*a.worker)
        return
    if a.smoke:
        a.cases = SMOKE_CASES
    for field, checkout in (("--before", a.before), ("--after", a.after)):
        if not (checkout / "fedjax_async" / "__init__.py").is_file():
            parser.error(f"{field} = {checkout}: must be the root of a checkout, with the folder fedjax_async")
    alike = True
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary).resolve() if a.keep is None else a.keep.resolve()
        inputs = folder / "inputs"
        inputs.mkdir(parents=True)
        for part in a.parts:
            rows, fine = JUDGES[part](a, folder, inputs)
            save_table(rows, (a.out or Path("runs") / "outcomes") / f"{part}.csv")
            alike = alike and fine
    if not alike:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
