"""What newcomers get wrong, and what the refusal has to name: one sentence, with key, value and mend."""

import re
from dataclasses import dataclass

MEND = re.compile(r"; .*\w|did you mean")
"""behind what is wrong a refusal says what to do"""


@dataclass(frozen=True)
class Misuse:
    command: tuple[str, ...]
    names: tuple[str, ...]
    """what its sentence has to hold: the key, or the file or option, and the value"""

    def objection(self, status: int, said: str) -> str:
        """What is wrong with a refusal; empty: nothing."""
        lines = [line for line in said.splitlines() if line.strip()]
        if "Traceback" in said:
            return "has a traceback"
        if status != 2:
            return f"ended with status {status}"
        if len(lines) != 1:
            return f"has {len(lines)} lines"
        if missing := [name for name in self.names if name not in lines[0]]:
            return f"does not name {', '.join(map(repr, missing))}"
        return "" if MEND.search(lines[0]) else "says no mend"


def of_run(*rest: str, names: tuple[str, ...]) -> Misuse:
    return Misuse(("run", "my.toml", *rest), names)


def key(name: str, value: str, *more: str) -> Misuse:
    """A value that cannot be, by the key and the value that have to be named."""
    return of_run(f"--{name}", value, *more, names=(name, value))


MISUSES = [
    Misuse(("run", "nothing.toml"), ("nothing.toml",)),
    Misuse(("run", "broken.toml"), ("broken.toml", "line 2")),
    Misuse(("run", "my.toml", "typo.toml"), ("learner.learning_rate", "learner.lr")),
    Misuse(("run", "my.toml", "section.toml"), ("learner", "5")),
    of_run("--lr", "1e-5", names=("lr", "learner.lr")),
    of_run("--learner.learning_rate", "1e-5", names=("learner.learning_rate", "learner.lr")),
    of_run("--batch_size", "8", names=("batch_size",)),
    of_run("--learner.lr", names=("learner.lr", "no value")),
    key("learner.lr", "fast"),
    key("learner.lr", "-1"),
    key("learner.ranks", "0"),
    key("learner.device", "tpu"),
    key("learner.warmup_steps", "-3"),
    of_run("--learner.device", "cuda", names=("accelerators", "learner.device")),
    key("schedule.kind", "aprill"),
    key("schedule.rollout_batch_size", "0"),
    key("schedule.rollout_batch_size", "many"),
    key("schedule.n_samples_per_prompt", "1"),
    key("schedule.max_steps", "0"),
    key("schedule.max_staleness", "-1"),
    key("schedule.over_sampling_batch_size", "1000"),
    key("schedule.over_sampling_batch_size", "3.5"),
    key("schedule.group_filter", "none_of_these"),
    key("sampling.max_response_tokens", "0"),
    key("sampling.temperature", "-1"),
    key("sampling.top_p", "2"),
    key("model.path", "nowhere"),
    key("model.path", "train.jsonl"),
    of_run("--model.path", "Qwen/Qwen3-0.6B", names=("model.path", "Qwen/Qwen3-0.6B", "hf download")),
    key("model.path", "no_weights"),
    key("model.path", "no_tokenizer"),
    of_run("--data.path", "nowhere.jsonl", names=("nowhere.jsonl",)),
    of_run("--data.path", "empty.jsonl", names=("empty.jsonl",)),
    of_run("--data.path", "torn.jsonl", names=("torn.jsonl", "2")),
    of_run("--data.path", "notes.txt", names=("notes.txt",)),
    of_run("--data.prompt_key", "text", names=("text", "question")),
    of_run("--data.label_key", "solution", names=("solution", "answer")),
    of_run("--data.eval_path", "nowhere.jsonl", names=("data.eval_path", "nowhere.jsonl")),
    of_run("--data.prompt_as", "chat", names=("chat template",)),
    key("data.prompt_as", "talk"),
    key("data.max_prompt_tokens", "0"),
    key("reward.name", "mathh"),
    key("reward.name", "my_rewards:grad"),
    key("reward.name", "no_such_module:grade"),
    key("reward.name", "torn_rewards:grade"),
    key("reward.name", "my_rewards:wrong_parameter"),
    key("reward.name", "my_rewards.grade"),
    key("reward.timeout_s", "0"),
    key("worker.count", "-1"),
    key("worker.engine", "sglangg"),
    key("worker.slots", "0"),
    key("worker.device", "gpu"),
    of_run("--worker.device", "cuda", names=("accelerators", "worker.device")),
    key("algorithm.loss", "ppoo"),
    key("algorithm.advantage", "grpoo"),
    of_run("--algorithm.corrections", '["tiss"]', names=("algorithm.corrections", "tiss")),
    key("algorithm.clip_low", "-1"),
    key("evaluation.prompts", "-1"),
    key("environment.name", "calculator_of_mine"),
    key("agent.program", "my_agents:run"),
    key("weights.backend", "carrier_pigeon"),
    key("broker.bind", "5555"),
    of_run("--broker.bind", "tcp://0.0.0.0:5555", names=("broker.bind", "tcp://0.0.0.0:5555", "april keygen")),
    key("security.keys", "no_keys"),
    of_run("--operations.sinks", '["wandbb"]', names=("operations.sinks", "wandbb")),
    key("operations.http", "nowhere"),
    key("run.name", "a/b"),
    key("run.dir", "my.toml"),
    of_run("--resume", "--run.name", "never", names=("run.name", "never")),
    of_run("--resume", names=("finished", "schedule.max_steps")),
    of_run("--resume", "--run.name", "mine-2", "--schedule.n_samples_per_prompt", "8", names=("n_samples_per", "8")),
    Misuse(("report", "runs/never"), ("runs/never",)),
    Misuse(("status", "runs/never"), ("runs/never",)),
    Misuse(("samples", "runs/mine", "--step", "99"), ("99",)),
    Misuse(("samples", "runs/mine", "--worst", "0"), ("--worst", "0")),
    Misuse(("worker", "my.toml", "--connect", "the-other-machine"), ("--connect", "the-other-machine")),
    Misuse(("dead-letters", "runs/mine", "--requeue", "some"), ("--requeue", "some")),
    Misuse(("simulate", "nothing.toml"), ("nothing.toml",)),
]
FILES = {
    "broken.toml": "[run]\nname = mine\n",
    "typo.toml": "[learner]\nlearning_rate = 1e-5\n",
    "section.toml": "learner = 5\n",
    "empty.jsonl": "",
    "torn.jsonl": '{"question": "a?", "answer": "a"}\n{"question": "b?"\n',
    "notes.txt": "a question, an answer\n",
    "torn_rewards.py": "def grade(response, label)\n    return 1.0\n",
}
"""beside the newcomer's own, by name"""
