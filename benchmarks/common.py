"""What every benchmark shares: its command line, its rows, the machine it ran on, the table and the JSON file."""

import argparse
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import orjson


@dataclass(frozen=True)
class Row:
    """One figure, measured n times in one call; `of` makes its value of them: the median, unless its goal says else."""

    name: str
    measured: list[float]
    unit: str
    of: Callable[[list[float]], float] = statistics.median

    def to_json(self) -> dict:
        return {
            "name": self.name,
            "value": self.of(self.measured),
            "unit": self.unit,
            "n": len(self.measured),
            "min": min(self.measured),
            "max": max(self.measured),
        }


def parser(description: str) -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(description=description)
    arguments.add_argument("--quick", action="store_true", help="less work, once: a smoke test, not a figure to quote")
    arguments.add_argument("--json", type=Path, metavar="FILE", help="where the rows are written")
    return arguments


def report(rows: list[Row], json_path: Path | None, tables: dict | None = None, **machine_facts) -> None:
    """Print the rows; write the file when one was asked for, with what else was printed and further facts of the
    machine."""
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


def read_runs(path: Path | None) -> list[dict]:
    """The lines that `write_run` has written to a file, if there is one; those of other commits are left out."""
    lines = [orjson.loads(line) for line in path.read_bytes().splitlines()] if path and path.exists() else []
    here = commit()
    found = [line for line in lines if line.pop("commit", None) == here]
    if len(found) < len(lines):
        print(f"{len(lines) - len(found)} runs of {path} are of other commits and left out", file=sys.stderr)
    return found


def write_run(path: Path | None, run: dict) -> None:
    """Append a line of JSON, if a file was asked for."""
    if path:
        with path.open("ab") as file:
            file.write(orjson.dumps(run | {"commit": commit()}, option=orjson.OPT_APPEND_NEWLINE))


def machine() -> dict:
    """What the figures depend on; nothing that names the host."""
    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.system(),
        "architecture": platform.machine(),
        "threads": os.environ.get("OMP_NUM_THREADS", "default"),
        "python": platform.python_version(),
        "packages": {name: installed(name) for name in ("numpy", "torch", "transformers", "pyzmq", "redis", "ray")},
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
    """The commit of the tree that was measured, with a + when it had changes."""
    here = Path(__file__).parent
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True)
    changes = subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=here, capture_output=True, text=True)
    return (head.stdout.strip() or "unknown") + ("+" if changes.stdout.strip() else "")
