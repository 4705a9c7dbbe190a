"""The dashboard of a long run in a real browser: 1,000,000 samples in 5,000 steps of 512 workers, on one machine.

How long until something is painted and the curves are drawn, until a filter of a column and a search of the text show
their first rows, each as the browser sees it; how long the server reads before it knows every sample, and how much
memory it takes. The run is written to a folder of its own, once: about 1.5 GB, some minutes. The browser is Chromium.
"""

import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import orjson
import pyarrow
import pyarrow.parquet as parquet
from common import APRIL, ROOT, Row, parser, report

sys.path.insert(0, str(ROOT))
BROWSER = "/usr/bin/chromium"
FULL, QUICK = (5000, 200, 512), (100, 200, 16)
"""Steps, samples a step, workers."""
REPEATS = 7
PATIENCE_MS, READY_MS = 120_000, 900_000
PROMPT_TOKENS, RESPONSE_TOKENS = 40, 60
WORDS = ["the", "a", "of", "and", "so", "then", "we", "add", "seven", "nine", "apples", "each", "gives", "is", "total"]
RARE = "persimmon"
"""A word that one sample of 500 has."""
SEEN = "() => document.querySelector('.samples tbody tr') && /%s/.test(document.querySelector('.count').textContent)"


def write_run(folder: Path, steps: int, samples: int, workers: int) -> Path:
    from april.util.versions import RUN_FOLDER
    from tests.support.synthetic_run import CONFIG, make_records, make_summary

    run = folder / "runs" / "long"
    (run / "samples").mkdir(parents=True)
    (run / "config.toml").write_text(CONFIG)
    RUN_FOLDER.claim(run, new=True)
    (line,) = make_records(1, 1, random.Random(0))
    lines = []
    with (run / "metrics.jsonl").open("wb") as file:
        for step in range(1, steps + 1):
            begin = line["time"] + 20.0 * step
            line |= {"step": step, "reward": 0.9 - 0.5 * 0.999**step + random.gauss(0, 0.02)}
            lanes = [span(f"worker-{w}", kind, begin, w) for w in range(workers) for kind in ("generate", "weights")]
            written = line | {"time": begin + 20.0, "lanes": lanes}
            file.write(orjson.dumps(written, option=orjson.OPT_APPEND_NEWLINE))
            lines.append(written | {"lanes": []})
    (run / "summary.json").write_bytes(orjson.dumps(make_summary(lines)))
    template = rows(samples, np.random.default_rng(0))
    for step in range(1, steps + 1):
        write_samples(run, step, template, np.random.default_rng(step))
    return run


def span(worker: str, kind: str, begin: float, number: int) -> dict:
    start = begin + (0.01 * (number % 50) if kind == "generate" else 18.0)
    return {"worker": worker, "kind": kind, "start": start, "end": start + (17.0 if kind == "generate" else 0.5)}


def rows(samples: int, chance: np.random.Generator) -> pyarrow.Table:
    from april.learner.samples import schema

    prompts = [" ".join(chance.choice(WORDS, 30)) for _ in range(samples // 8)]

    def one(number: int) -> dict:
        ids = chance.integers(0, 150_000, RESPONSE_TOKENS)
        figures = -chance.random(RESPONSE_TOKENS).astype(np.float32)
        return {
            "step": 0, "group": number // 8, "index": number % 8, "branch": 0, "prompt": prompts[number // 8],
            "prompt_ids": ids[:PROMPT_TOKENS],
            "response": " ".join(chance.choice(WORDS, RESPONSE_TOKENS)), "response_ids": ids,
            "segments": [{"start": 0, "end": RESPONSE_TOKENS, "branch": 0, "step": 0}],
            "behaviour_logprobs": figures, "learner_logprobs": figures, "entropies": -figures, "reward": 0.0,
            "advantage": 0.0, "trained": True, "finish_reason": "stop", "discarded": "",
        }  # fmt: skip

    return pyarrow.Table.from_pylist([one(number) for number in range(samples)], schema=schema())


def write_samples(run: Path, step: int, table: pyarrow.Table, chance: np.random.Generator) -> None:
    from april.learner.samples import row_group_size

    count = len(table)
    texts = table["response"].to_pylist()
    for row in np.flatnonzero(chance.random(count) < 1 / 500).tolist():
        texts[row] = f"{texts[row]} {RARE}"
    segments = [[{"start": 0, "end": RESPONSE_TOKENS, "branch": 0, "step": max(0, step - 1 - int(age))}]
                for age in chance.integers(0, 4, count)]  # fmt: skip
    new = {
        "step": pyarrow.array([step] * count, "int32"),
        "group": pyarrow.array(np.arange(count) // 8 + step * count // 8, "int64"),
        "response": pyarrow.array(texts),
        "segments": pyarrow.array(segments, table.schema.field("segments").type),
        "reward": pyarrow.array(chance.random(count).round(3)),
        "advantage": pyarrow.array(chance.normal(size=count), "float32"),
    }
    for name, column in new.items():
        table = table.set_column(table.schema.get_field_index(name), name, column)
    path = run / f"samples/step_{step:06d}.parquet"
    size = row_group_size(count, count * (PROMPT_TOKENS + RESPONSE_TOKENS))
    parquet.write_table(table, path, row_group_size=size, compression="zstd")


class Served:
    """The dashboard of a run in a process of its own, until the block is left."""

    def __init__(self, run: Path):
        self.began = time.monotonic()
        command = [*APRIL, "dashboard", str(run), "--port", "0"]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        self.address = self.process.stdout.readline().removeprefix("dashboard: ").strip()

    def __enter__(self) -> "Served":
        return self

    def __exit__(self, *error: object) -> None:
        self.process.terminate()
        self.process.wait(20)

    def memory_mb(self, name: str) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        (line,) = [line for line in status.splitlines() if line.startswith(f"{name}:")]
        return int(line.split()[1]) / 1000


def measure(served: Served, total: int, repeats: int) -> list[Row]:
    from playwright.sync_api import sync_playwright

    times: dict[str, list[float]] = {}

    def took(name: str, began: float) -> None:
        times.setdefault(name, []).append(time.monotonic() - began)

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(PATIENCE_MS)
        samples = f"{served.address}#/long/samples"
        page.goto(samples)
        page.wait_for_function(SEEN % f"^{total:,} samples.*shown.$", timeout=READY_MS)
        took("dashboard_ready_s", served.began)
        for repeat in range(repeats):
            page.close()
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            page.set_default_timeout(PATIENCE_MS)
            began = time.monotonic()
            page.goto(f"{served.address}#/long/run")
            page.locator(".chart canvas").nth(4).wait_for()
            took("dashboard_curves_s", began)
            paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
            times.setdefault("dashboard_first_paint_s", []).append(paint / 1000)
            page.goto(samples)
            page.wait_for_function(SEEN % f"^{total:,} samples")
            began = time.monotonic()
            page.get_by_label("Reward, most").fill(f"0.{repeat + 2}")
            page.wait_for_function(SEEN % rf"^(?!{total:,} )[\d,]+ samples")
            took("dashboard_filter_s", began)
            page.get_by_label("Reward, most").fill("")
            page.wait_for_function(SEEN % f"^{total:,} samples")
            began = time.monotonic()
            page.get_by_label("Search prompts and responses").fill(RARE)
            page.wait_for_function(SEEN % r"Search|found")
            took("dashboard_search_first_s", began)
            page.get_by_label("Search prompts and responses").fill("")
            page.wait_for_function(SEEN % f"^{total:,} samples")
        browser.close()
    memory = [("dashboard_server_mb", "VmRSS"), ("dashboard_server_peak_mb", "VmHWM")]
    return [Row(name, values, "s") for name, values in times.items()] + [
        Row(name, [served.memory_mb(field)], "MB") for name, field in memory
    ]


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--folder", type=Path, help="where the run is kept to be used again [default: it is not]")
    given = arguments.parse_args()
    steps, samples, workers = QUICK if given.quick else FULL
    with tempfile.TemporaryDirectory(prefix="dashboard-") as folder:
        kept = (given.folder or Path(folder)) / "runs" / "long"
        run = kept if kept.is_dir() else write_run(kept.parents[1], steps, samples, workers)
        with Served(run) as served:
            rows = measure(served, steps * samples, 1 if given.quick else REPEATS)
    report(rows, given.json)


if __name__ == "__main__":
    main()
