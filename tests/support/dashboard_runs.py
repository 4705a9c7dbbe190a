"""Run folders for tests of the dashboard: metrics as a broker writes them, samples as a learner writes them, and a
byte-level tokeniser."""

import itertools
import random
import time

import orjson
import pyarrow
import pyarrow.parquet as parquet
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from april.learner.samples import schema
from tests.support.synthetic_run import START_S, write_run

HOSTILE = [
    "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">",
    "שלום \u202e txet sdrawkcab \u2066 of both ways",
    "w" * 10_000,
    "a\0b\x07\x1b[31m red \r\n and &lt;b&gt; {{7*7}} ${7*7} 日本語 🎉",
]
"""Responses of the first samples of the first step: HTML, bidirectional text, very long text and control characters."""
BROKEN = b"broken \xff\xfe UTF-8 \xc3"
GROUPS, SIZE, ROW_GROUP_SAMPLES = 6, 4, 16


def tokenizer():
    """A tokeniser with one token per byte."""
    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    found = Tokenizer(BPE(vocabulary, merges=[]))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    return found


def make_run(folder, name="demo", steps=12, seed=0):
    """Write a run to `folder/runs/name` and its tokeniser to `folder/cache/policy`; returns the run folder."""
    run = write_run(folder / "runs" / name, steps, seed=seed)
    (folder / "cache/policy").mkdir(parents=True, exist_ok=True)
    letters = tokenizer()
    letters.save(str(folder / "cache/policy/tokenizer.json"))
    for step in range(1, steps + 1):
        write_samples(run, step, letters, seed)
    return run


def write_samples(run, step, letters, seed=0, broken=True):
    """Write the samples file of a step; if `broken`, the last response of the first step is not valid UTF-8."""
    write_rows(run, step, rows_of(step, letters, random.Random(f"{seed} {step}")), broken)


def write_rows(run, step, rows, broken=False):
    """Write a samples file under a temporary name and rename it, as a learner does, so that a dashboard never reads a
    partial file."""
    table = pyarrow.Table.from_pylist(rows, schema=schema(token_scores=True))
    if step == 1 and broken:
        texts = [row["response"].encode() for row in rows[:-1]] + [BROKEN]
        column = pyarrow.array(texts, pyarrow.binary()).view(pyarrow.string())
        table = table.set_column(table.schema.get_field_index("response"), "response", column)
    (run / "samples").mkdir(exist_ok=True)
    draft = run / "samples/draft"
    parquet.write_table(table, draft, row_group_size=ROW_GROUP_SAMPLES)
    draft.replace(run / f"samples/step_{step:06d}.parquet")


def rows_of(step, letters, chance):
    hostile = iter(HOSTILE if step == 1 else [])
    return [row(step, group, index, letters, chance, next(hostile, None)) for group, index in places()]


def places():
    return itertools.product(range(GROUPS), range(SIZE))


def row(step, group, index, letters, chance, text=None):
    prompt = f"How much is {group} + {group}? "
    response = text or f"Let me think about step {step}. It is {group + group + (index == 3)} ✓"
    count = len(ids := letters.encode(response).ids)
    cut = count // 2 if index % 2 and step > 2 else 0
    segments = [{"start": cut, "end": count, "incarnation": 0, "step": step - 1}]
    if cut:
        segments.insert(0, {"start": 0, "end": cut - 3, "incarnation": 0, "step": step - 2})
    sampled = [cut == 0 or not cut - 3 <= at < cut for at in range(count)]
    engine = [-chance.random() if is_policy else None for is_policy in sampled]
    return {
        "step": step,
        "group": 10 * step + group,
        "index": index,
        "fork": 0,
        "prompt": prompt,
        "response": response,
        "label": str(group + group),
        "held_out": "",
        "prompt_ids": letters.encode(prompt).ids,
        "response_ids": ids,
        "segments": segments,
        "behaviour_logprobs": engine,
        "learner_logprobs": [value and value + chance.gauss(0, 0.3) for value in engine],
        "entropies": [value and 3 * chance.random() for value in engine],
        "turns": [],
        "token_scores": [
            {"name": "big_teacher", "values": [value and value - at / 9 for at, value in enumerate(engine)]}
        ],
        "reward": 0.0 if index == 3 else 1.0,
        "reward_details": [{"name": "correct", "value": float(index != 3)}],
        "opened_at": START_S + step,
        "delivered_at": START_S + step + 4 + index,
        "spans": [
            {
                "what": "generate",
                "where": f"worker-{index}",
                "began": START_S + step + 0.5,
                "ended": START_S + step + 2.5,
                "start": 0,
                "end": count,
                "how": "stop",
            }
        ],
        "chunks": [{"end": end, "at": START_S + step + at} for end, at in ((count // 2, 1.25), (count, 2.5))],
        "advantage": -1.5 if index == 3 else 0.5,
        "trained": True,
        "finish_reason": "length" if text else "stop",
        "discarded": "",
    }


def discards(step, letters, chance):
    """Rows of discarded samples: two of a group without reward spread, and one that died before it had a reward."""
    found = []
    for index, reason in enumerate(("zero_spread", "zero_spread", "dead_sample")):
        sample = row(step, GROUPS + (reason == "dead_sample"), index, letters, chance)
        of_the_learner = {"learner_logprobs": None, "entropies": None, "advantage": None, "trained": False}
        found.append(sample | of_the_learner | {"discarded": reason, "discarded_at": sample["delivered_at"]})
        found[-1] |= {"delivered_at": None, "attempts": 0, "error": "", "discarded_from": 0}
    found[-1] |= {"reward": None, "attempts": 5, "error": "engine <b>fell</b> over", "finish_reason": ""}
    return found


def add_step(run):
    """Append one more step to metrics.jsonl and write its samples; returns the step."""
    lines = (run / "metrics.jsonl").read_bytes().splitlines()
    last = orjson.loads(lines[-1])
    more = last | {"step": last["step"] + 1, "time": last["time"] + 5, "reward": 0.123}
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(orjson.dumps(more, option=orjson.OPT_APPEND_NEWLINE))
    write_samples(run, more["step"], tokenizer())
    return more["step"]


WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 400, "height": 800}


def steps_read(client, name="demo"):
    """Wait until the dashboard has read all steps of the run; returns the client. Earlier answers have only the steps
    read so far."""
    deadline = time.monotonic() + 60
    while not client.get(f"/api/runs/{name}").json()["all_read"]:
        assert time.monotonic() < deadline
    return client


def stored(run, step):
    return parquet.read_table(run / f"samples/step_{step:06d}.parquet").to_pylist()
