"""The server's process is small: 200 MB with a million samples (`benchmarks/studies.md`)."""

import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest

from april.observe.dashboard.index import SampleIndex
from tests.support.dashboard_runs import make_run


@pytest.mark.full
def test_no_request_loads_pandas(runs_folder):
    command = [sys.executable, "-m", "april.cli", "dashboard", str(runs_folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            address = process.stdout.readline().removeprefix("dashboard: ").strip().rstrip("/")
            for path in ("samples?sort=-reward", "search?text=a", "excerpts?of=5.0", "samples/5/50/1", "groups/5/50"):
                assert urlopen(f"{address}/api/runs/demo/{path}").status == 200
            assert urlopen(f"{address}/api/compare?a=demo&b=other").status == 200
            loaded = Path(f"/proc/{process.pid}/maps").read_text()
        finally:
            process.terminate()
    assert "/pyarrow/" in loaded and "/pandas/" not in loaded


def test_a_column_added_in_a_later_file_is_nan_before(tmp_path):
    """And room for more rows changes none that are there."""
    import pyarrow
    import pyarrow.parquet as parquet

    run = make_run(tmp_path, steps=4)
    index, rewards = SampleIndex(run), []
    for step in (1, 2, 3, 4):
        path = run / f"samples/step_{step:06d}.parquet"
        table = parquet.read_table(path)
        rewards += table["reward"].to_pylist()
        if step >= 3:
            parquet.write_table(table.append_column("late", pyarrow.array([float(step)] * len(table))), path)
        index.scan()
        index._pending_files = [(step, path)]
        assert index.advance()
    assert index.column("reward").tolist() == rewards
    late = index.column("late").tolist()
    assert [value for value in late if value == value] == [3.0] * (len(late) // 4) + [4.0] * (len(late) // 4)
    assert index.position(len(late) // 4 + 2) == (2, 2)
