"""The harness of all benchmarks: command line, rows, turns, processes, and the table and JSON file of the results."""

import argparse
import contextlib
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import orjson

ROOT = Path(__file__).resolve().parents[1]
APRIL = (sys.executable, "-m", "april.cli")
END_S = 10.0
"""How long a process may take to leave before it is killed (seconds)."""
RUN_S = 3600.0
"""Longest time of a run; a longer one has failed (seconds)."""


@dataclass(frozen=True)
class Row:
    """A figure with its n measurements; `of` reduces them to its value, by default the median."""

    name: str
    measured: list[float]
    unit: str
    of: Callable[[list[float]], float] = statistics.median

    def to_json(self) -> dict:
        return {
            "name": self.name, "value": self.of(self.measured), "unit": self.unit, "n": len(self.measured),
            "min": min(self.measured), "max": max(self.measured),
        }  # fmt: skip


def parser(description: str) -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(description=description)
    arguments.add_argument("--quick", action="store_true", help="less work, once: a smoke test, not a figure to quote")
    arguments.add_argument("--json", type=Path, metavar="FILE", help="where the rows are written")
    return arguments


def report(rows: list[Row], json_path: Path | None, tables: dict | None = None, **machine_facts) -> None:
    """Print the rows; write them to the JSON file, if there is one, with further tables and facts of the machine."""
    print(table(rows))
    if json_path is not None:
        result = {"machine": machine() | machine_facts, "commit": commit(), "rows": [row.to_json() for row in rows]}
        result |= {"tables": tables} if tables else {}
        json_path.write_bytes(
            orjson.dumps(result, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY)
        )


def table(rows: list[Row]) -> str:
    cells = [["name", "value", "unit", "n", "min", "max"]]
    for row in rows:
        facts = row.to_json()
        numbers = {key: short(facts[key]) for key in ("value", "min", "max")}
        cells.append([str((facts | numbers)[key]) for key in cells[0]])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells
    )


def short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def in_turns(turn: int, ours: Callable, theirs: Callable) -> tuple[Callable, Callable]:
    """The order of two sides in a turn: they take turns at going first."""
    return (ours, theirs) if turn % 2 == 0 else (theirs, ours)


def ratios(ours: Iterable[float], theirs: Iterable[float]) -> list[float]:
    return [a / b for a, b in zip(ours, theirs, strict=True)]


# --- runs and processes -----------------------------------------------------------------------------------------------


def quickstart_policy(folder: Path, quick: bool) -> Path:
    """The quickstart's warm-started policy, from the cache; a quick one has hardly been trained."""
    from april.launch.sft.warm_start import Recipe, make_policy

    if quick:
        return make_policy(folder / "policy", recipe=Recipe(easy=16, clean=16, noisy=32))
    return make_policy(ROOT / "cache/policy", log=lambda line: print(line, file=sys.stderr)).absolute()


def write_lines(path: Path, rows: Iterable[dict]) -> Path:
    """Write a JSONL file."""
    path.write_bytes(b"".join(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in rows))
    return path


def read_lines(path: Path) -> list[dict]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def execute(command: Iterable[object], log: Path, threads: int, **variables: str) -> None:
    """Run a command to its end, on so many threads. Ends the benchmark if it fails."""
    words = [str(word) for word in command]
    environment = environment_of(threads) | variables
    with log.open("wb") as output:
        done = subprocess.run(words, stdout=output, stderr=output, env=environment, cwd=ROOT, timeout=RUN_S)
    if done.returncode:
        sys.exit(f"{' '.join(words)} ended with status {done.returncode}:\n{log.read_text()[-3000:]}")


def environment_of(threads: int) -> dict[str, str]:
    """The environment of a process that imports this checkout, on so many threads."""
    return os.environ | {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": str(threads)}


def python_path() -> str:
    """The repository root, then what this process has in PYTHONPATH."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


@contextlib.contextmanager
def process(command: Iterable[object], log: Path, **options) -> Iterator[subprocess.Popen]:
    """A process that is asked to leave at the end of the block, and killed if it does not."""
    with log.open("wb") as output:
        started = subprocess.Popen(list(map(str, command)), stdout=output, stderr=output, **options)
    try:
        yield started
    finally:
        started.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            started.wait(END_S)
        started.kill()
        started.wait()


def wait_for(
    condition: Callable,
    what: str,
    alive: subprocess.Popen | None = None,
    timeout_s: float = 300.0,
    poll_s: float = 0.005,
):
    """The condition's value, once it is true. Ends the benchmark after the time, or when the process has ended."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        if time.monotonic() > deadline or (alive and alive.poll() is not None):
            sys.exit(f"{what}: not within {timeout_s:g} s, or its process has ended")
        time.sleep(poll_s)
    return found


def start_sglang(policy: Path, log: Path, slots: int, context_tokens: int):
    """An SGLang server of this checkout's environment that answers; its caller kills it."""
    import asyncio

    from april.workers.engines.sglang.client import SGLangClient
    from april.workers.engines.sglang.server import ServerSettings, SGLangServer

    async def answering() -> None:
        client = SGLangClient(server.url)
        try:
            await server.wait(client)
        finally:
            await client.close()

    python = ROOT / ".venv-sglang/bin/python"
    server = SGLangServer(ServerSettings(python, policy, log, slots=slots, context_tokens=context_tokens))
    server.spawn()
    asyncio.run(answering())
    return server


def processor_s(process_id: int) -> float:
    """Processor time that a process has taken, user and system (seconds)."""
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# --- runs that are kept -----------------------------------------------------------------------------------------------


def read_runs(path: Path | None) -> list[dict]:
    """Runs that `write_run` has appended to a file at this commit; none without a file."""
    lines = [orjson.loads(line) for line in path.read_bytes().splitlines()] if path and path.exists() else []
    here = commit()
    found = [line for line in lines if line.pop("commit", None) == here]
    if len(found) < len(lines):
        print(f"{len(lines) - len(found)} runs of {path} are of other commits and left out", file=sys.stderr)
    return found


def write_run(path: Path | None, run: dict) -> None:
    """Append a run to the file of runs, if there is one."""
    if path:
        with path.open("ab") as file:
            file.write(orjson.dumps(run | {"commit": commit()}, option=orjson.OPT_APPEND_NEWLINE))


# --- the machine ------------------------------------------------------------------------------------------------------


def machine() -> dict:
    """Facts of the machine that figures depend on, without the name of the host."""
    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.system(),
        "architecture": platform.machine(),
        "threads": os.environ.get("OMP_NUM_THREADS", "default"),
        "python": platform.python_version(),
        "packages": {name: installed(name) for name in ("numpy", "torch", "transformers", "pyzmq", "redis")},
    }


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def commit() -> str:
    """The commit of the tree that was measured, with a + when it had changes; without git or its history what
    APRIL_COMMIT says."""
    here, packed = Path(__file__).parent, os.environ.get("APRIL_COMMIT") or "unknown"
    if shutil.which("git") is None:
        return packed
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True)
    changes = subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=here, capture_output=True, text=True)
    return (head.stdout.strip() or packed) + ("+" if changes.stdout.strip() else "")
