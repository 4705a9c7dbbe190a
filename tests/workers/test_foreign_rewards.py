"""Reward functions with the signatures of TRL, verl and verifiers, called by name like April's own verifiers."""

import importlib
import json

import pytest

from april import cli
from april.config import ConfigError
from april.data.rows import DatasetRow, row_prompt
from april.workers.rewards.messages import Item, RewardRules
from april.workers.rewards.process import verify
from april.workers.rewards.verifiers import check_verifier, find_verifier, reads_state

FUNCTIONS = '''
def lengths(prompts, completions, **columns):
    """A TRL function of messages; it also reports the number of completions per call and a column's value."""
    assert prompts[0] == [{"role": "user", "content": "1+1="}]
    return [len(said[0]["content"]) + 10 * len(completions) for said in completions]

def right(completions, solution, **columns):
    return [float(said[0]["content"] == wanted) for said, wanted in zip(completions, solution)]

def of_texts(prompts, completions, answer):
    return [float(prompt + text == wanted) for prompt, text, wanted in zip(prompts, completions, answer)]

def of_two(completions, solution, difficulty):
    return [one * (said[0]["content"] == wanted) for said, wanted, one in zip(completions, solution, difficulty)]

async def later(completions, **columns):
    return [float(columns["answer"][0])] * len(completions)

def count(prompts, **columns):
    return [float(len(asked)) for asked in prompts]

def none(completions, **columns):
    return [None] * len(completions)

def of_trainer(completions, completion_ids, **columns):
    return [0.0]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """A verl function."""
    right = solution_str == ground_truth
    score = right - (data_source == "hard") / 2
    return {"score": score, "acc": right, "pred": solution_str, "index": extra_info["index"]}

def grade(solution_str, ground_truth, method="strict"):
    return solution_str == ground_truth

async def asked(prompt, completion, answer, state, info):
    """A function of the verifiers library."""
    assert state["completion"] == completion and prompt[-1]["role"] == "user"
    return float(completion[-1]["content"] == answer) + info.get("bonus", 0)

def parsed(completion, parser):
    return 0.0

ROW = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "1+1="}]

def of_row(prompts, completions, **columns):
    """A TRL function that wants the row's own messages."""
    return [float(asked == ROW) for asked in prompts]

def asked_row(prompt, completion, state):
    return float(prompt == state["prompt"] == ROW)

def text_of_row(prompts, completions, **columns):
    return [float(asked == "What is 1+1?") for asked in prompts]

def message_of_row(prompts, completions, **columns):
    return [float(asked == [{"role": "user", "content": "What is 1+1?"}]) for asked in prompts]
'''


TASKS = """
import verifiers.v1 as vf

class Sum(vf.TaskData):
    answer: str

class Adds(vf.Task[Sum]):
    @vf.reward
    async def right(self, trace):
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def keyed(self, task, trace):
        return {"asked": float(task.prompt_text == "1+1="), "short": float(len(trace.last_reply) < 3)}

    @vf.metric
    async def length(self, trace):
        return float(len(trace.last_reply))

class Asked(vf.Task[Sum]):
    @vf.reward
    async def messages(self, task, trace):
        asked = [(message.role, message.content) for message in self.data.prompt]
        said = [(node.message.role, node.message.content) for node in trace.nodes]
        return float(asked == [("system", "Be short."), ("user", "1+1=")] and said == [*asked, ("assistant", "2")])

class InABox(vf.Task[Sum]):
    @vf.reward
    async def ran(self, runtime):
        return 1.0
"""


@pytest.fixture(scope="module", autouse=True)
def functions(tmp_path_factory):
    folder = tmp_path_factory.mktemp("functions")
    (folder / "theirs.py").write_text(FUNCTIONS)
    (folder / "tasks.py").write_text(TASKS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        importlib.invalidate_caches()
        yield


def score(name, response="2", label="2", row_prompt=""):
    item = Item(0, name, response, label, "stop", "1+1=", 1, row_prompt=row_prompt)
    (score,) = verify([item], RewardRules())
    return score


TWO = json.dumps({"solution": "2", "difficulty": 0.5})
VERL = json.dumps({"data_source": "hard", "ground_truth": "2", "extra_info": {"index": 7}})
WORTH = {
    ("trl:theirs:lengths", "2"): 11.0,
    ("trl:theirs:right", "2"): 1.0,
    ("trl:theirs:right", "3"): 0.0,
    ("trl_text:theirs:of_texts", "1+1=2"): 1.0,
    ("trl:theirs:of_two", TWO): 0.5,
    ("trl:theirs:later", "4"): 4.0,
    ("verl:theirs:compute_score", VERL): 0.5,
    ("verl:theirs:grade", "2"): 1.0,
    ("verifiers:theirs:asked", "2"): 1.0,
    ("verifiers:theirs:asked", '{"answer": "2", "info": {"bonus": 2}}'): 3.0,
}


@pytest.mark.parametrize("which", WORTH, ids=lambda which: " ".join(which)[:50])
def test_a_function_of_another_framework_is_called_as_that_framework_calls_it(which):
    name, label = which
    check_verifier(name)
    given = score(name, label=label)
    assert (given.error, given.reward) == (None, WORTH[which])


def test_the_numbers_beside_verl_s_score_are_details():
    assert score("verl:theirs:compute_score", label=VERL).details == {"acc": 1.0, "index": 7.0, "over_limit": 0.0}


def test_a_verifiers_task_gives_the_weighted_sum_of_its_rewards_with_metrics_as_details():
    check_verifier("verifiers:tasks:Adds")
    given = score("verifiers:tasks:Adds")
    assert (given.error, given.reward) == (None, 2.0)
    assert given.details == {"right": 1.0, "asked": 1.0, "short": 1.0, "length": 1.0, "over_limit": 0.0}
    assert score("verifiers:tasks:Adds", "11", '{"answer": "2"}').reward == 1.0
    with pytest.raises(ConfigError, match="'ran'"):
        check_verifier("verifiers:tasks:InABox")


MESSAGES = json.dumps([{"role": "system", "content": "Be short."}, {"role": "user", "content": "1+1="}])
TEXT = json.dumps("What is 1+1?")


@pytest.mark.parametrize(
    ("name", "row_prompt"),
    [
        ("trl:theirs:of_row", MESSAGES), ("verifiers:theirs:asked_row", MESSAGES), ("verifiers:tasks:Asked", MESSAGES),
        ("trl_text:theirs:text_of_row", TEXT), ("trl:theirs:message_of_row", TEXT),
    ],
)  # fmt: skip
def test_a_function_gets_the_prompt_as_the_row_has_it(name, row_prompt):
    given = score(name, row_prompt=row_prompt)
    assert (given.error, given.reward) == (None, 1.0)


def test_a_function_of_a_group_gets_the_row_s_messages():
    items = [Item(at, "group:trl:theirs:of_row", "2", "2", "stop", "1+1=", row_prompt=MESSAGES) for at in range(2)]
    assert [one.reward for one in find_verifier("group:trl:theirs:of_row")(items, RewardRules())] == [1.0, 1.0]


def test_only_a_reward_that_gets_the_row_s_prompt_is_sent_it():
    row = DatasetRow([{"role": "user", "content": "1+1="}], "2")
    for name in ("trl:theirs:right", "group:trl:theirs:right", "trl_text:theirs:of_texts", "verifiers:theirs:asked"):
        assert json.loads(row_prompt(row, [name])) == row.prompt
    for name in ("exact", "verl:theirs:grade", "group:theirs:right", "theirs:right"):
        assert row_prompt(row, [name]) == ""
    assert row_prompt(row, ["exact", "trl:theirs:right"]), "a part of the reward gets it"
    assert row_prompt(DatasetRow("", "2"), ["trl:theirs:right"]) == "", "a prompt that a trainer submits has no row"


def test_a_function_of_trl_may_see_the_whole_group():
    items = [
        Item(place, "group:trl:theirs:lengths", text, "2", "stop", "1+1=", 1) for place, text in enumerate(("a", "bcd"))
    ]
    assert [one.reward for one in find_verifier("group:trl:theirs:lengths")(items, RewardRules())] == [21.0, 23.0]


ERRORS = {
    ("trl:theirs:none", "2"): "returned None, by which TRL leaves a response out",
    ("trl:theirs:of_two", "2"): "needs the columns solution, difficulty; name them in data.label_key = 'solution,diff",
    ("verl:theirs:compute_score", "2"): "KeyError: 'index'",
}


@pytest.mark.parametrize("which", ERRORS, ids=lambda which: which[0])
def test_a_missing_result_is_an_error_and_never_zero(which):
    given = score(which[0], label=which[1])
    assert given.reward is None and ERRORS[which] in given.error


REFUSED = {
    "trl:theirs:of_trainer": "its parameter 'completion_ids' is what TRL's trainer has",
    "verifiers:theirs:parsed": "its parameter 'parser' is none of prompt, completion, answer",
    "group:verl:theirs:grade": "a function of verl sees one response at a time; leave out group:",
    "trl:theirs:nowhere": "theirs has no 'nowhere'",
    "trl:theirs": "'reward.name' = 'trl:theirs' is no verifier",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_function_that_cannot_be_called_is_refused_before_a_run_starts(name):
    with pytest.raises(ConfigError) as caught:
        check_verifier(name)
    assert REFUSED[name] in str(caught.value)


def test_a_parameter_state_of_verifiers_is_not_an_environment_s_state():
    assert not reads_state("verifiers:theirs:asked")


def test_a_dry_run_calls_the_function_on_rows_with_their_columns(config_file, tmp_path, capsys):
    asked = [{"role": "user", "content": "04*3"}, {"role": "user", "content": "+90="}]
    row = {"prompt": asked, "solution": "102", "difficulty": 2}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    rows = str(tmp_path / "rows.jsonl")
    keys = ["--data.path", rows, "--data.eval_path", rows, "--data.label_key", "solution,difficulty"]
    cli.main(["run", str(config_file), "--dry-run", *keys, "--reward.name", "trl:theirs:of_two"])
    said = capsys.readouterr().out
    assert "trl:theirs:of_two: a response that is the label, of" in said and "is worth 0" in said
    cli.main(["run", str(config_file), "--dry-run", *keys, "--reward.name", "trl:theirs:count"])
    assert "trl:theirs:count: a response that is the label, of" in (said := capsys.readouterr().out)
    assert "is worth 2" in said


@pytest.mark.full
def test_trl_s_own_reward_grades_mathematics():
    label = json.dumps({"solution": "$\\frac{1}{2}$"})
    assert score("trl:trl.rewards:accuracy_reward", "So $\\boxed{\\frac{1}{2}}$", label).reward == 1.0
    assert score("trl:trl.rewards:accuracy_reward", "So $\\boxed{2}$", label).reward == 0.0
