"""Before a run starts, functions of one's own are called once, and reference answers graded by their own verifiers.

All but filters run in processes of their own, as in the run.
"""

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from april.config import Config, ConfigError
from april.data.rows import GROUP_REWARD
from april.data.tokenizer import Tokenizer
from april.environments import ENVIRONMENTS
from april.environments.messages import Answer, Call, EnvironmentRules
from april.environments.pool import EnvironmentPool
from april.filters.filters import CompleteGroup, FilterFailed, GroupFilters, ask
from april.launch.agent_rehearsal import run_once
from april.launch.check import Findings
from april.launch.rows import Seen, prompt_text
from april.processes.blame import raised
from april.processes.pool import ProcessPool
from april.words import counted
from april.workers.rewards.messages import GroupScore, Item, Score
from april.workers.rewards.pool import RewardPool
from april.workers.rewards.verifiers import check_verifier, reads_state, right_response
from april.workers.scoring import reward_rules

POLL_S = 0.001
QUEUED = 64
"""rows that wait for a verifier; the others are not made ready before there is time for them"""
FILTER_S = 10.0
"""longest call of a filter, which holds the broker up for as long"""
REWARD_MEND = "return a number, or a number and a dictionary of numbers"
STARTING_S, DRY_S = 0.3, 20.0
"""for grading beyond the first row of each verifier, when a run starts and in a dry run"""
FIRST_S = 15.0
"""longest wait beyond that for the first answer of what may take longer by its own time limit"""


class Rehearsal:
    """Its processes are started at once, so that they are up when the rows have been read.

    with Rehearsal(config, found) as rehearsal:
        rehearsal.hold(look_at_rows(...), tokenizer, patience_s)
    """

    def __init__(self, config: Config, found: Findings):
        self.config, self.found = config, found
        rules = msgspec.structs.replace(
            reward_rules(config), traced=True, over_limit="failed", overlong_buffer_tokens=0, format_pattern=""
        )
        self.verifiers = RewardPool(1, rules)
        section = config.environment
        environment = EnvironmentRules(section.name, section.timeout_s, section.memory_mb, traced=True)
        self.environment = EnvironmentPool(1 if section.name else 0, environment)

    def __enter__(self) -> "Rehearsal":
        return self

    def __exit__(self, *_) -> None:
        self.verifiers.close()
        self.environment.close()

    def hold(self, seen: list[Seen], tokenizer: Tokenizer, patience_s: float) -> None:
        """Whatever goes wrong on every row is an objection; on some of them, a remark."""
        state = self._ask_environment(seen[0])
        by_verifier: dict[str, list[int]] = defaultdict(list)
        for number, one in enumerate(seen):
            by_verifier[one.row.reward or self.config.reward.name].append(number)
        by_verifier = {name: numbers for name, numbers in by_verifier.items() if self._is_there(name)}
        if self.config.environment.name:
            by_verifier = {name: numbers[:1] for name, numbers in by_verifier.items()}
        if state is None and (self.config.environment.name or self.config.agent.is_set):
            by_verifier = {name: numbers for name, numbers in by_verifier.items() if not reads_state(name)}
        scores = self._grade(by_verifier, seen, tokenizer, state or b"", patience_s)
        graded = {
            name: [(seen[number], scores[number]) for number in numbers if number in scores]
            for name, numbers in by_verifier.items()
        }
        said = [self._judge(name, of_verifier) for name, of_verifier in graded.items()]
        self.found.facts["rewards"] = "\n".join(filter(None, said))
        self._run_agent(seen[0], tokenizer, patience_s)
        self._ask_filters(next(iter(scores.values()), None))

    def _is_there(self, name: str) -> bool:
        """Otherwise it has been objected to."""
        try:
            check_verifier(name, url=self.config.reward.url)
        except ConfigError:
            return False
        return True

    # --- verifiers ------------------------------------------------------------------------------------------------

    def _grade(
        self, by_verifier: dict[str, list[int]], seen: list[Seen], tokenizer: Tokenizer, state: bytes, patience_s: float
    ) -> dict[int, Score]:
        """By the row's number: of the first row of each verifier, and of as many more as there is time for."""
        first = {numbers[0] for numbers in by_verifier.values()}
        others = [number for numbers in by_verifier.values() for number in numbers[1:]]
        names = {number: name for name, numbers in by_verifier.items() for number in numbers}
        waiting, scores = deque((*sorted(first), *sorted(others))), dict[int, Score]()

        def submit_more() -> None:
            while waiting and len(self.verifiers.queue) < QUEUED:
                number = waiting.popleft()
                self._submit(number, names[number], seen[number], tokenizer, state)

        submit_more()
        for answer in self._answers(self.verifiers, patience_s, lambda: first <= scores.keys(), submit_more):
            scores[answer.key] = answer.scores[0] if isinstance(answer, GroupScore) else answer
        return scores

    def _answers(
        self, pool: ProcessPool, patience_s: float, enough: Callable[[], bool], submit_more: Callable[[], None]
    ) -> Iterator[Any]:
        """As they come: all there are in time, which is `FIRST_S` longer until there are `enough`, and begins when the
        first process is up."""
        up, began = False, time.monotonic()
        while pool.pending and time.monotonic() - began < patience_s + (0 if enough() else FIRST_S):
            yield from pool.poll()
            submit_more()
            if not up:
                up, began = pool.processes[0].ready, time.monotonic()
            time.sleep(POLL_S)

    def _submit(self, number: int, name: str, one: Seen, tokenizer: Tokenizer, state: bytes) -> None:
        label = one.row.label
        example = right_response(name)
        response = example(label) if example else label
        prompt = tokenizer.decode(one.tokens) if len(one.tokens) else prompt_text(one.row)
        tokens = len(tokenizer.encode_prompt(response))
        item = Item(number, name, response, label, "stop", prompt, tokens, state)
        if name.startswith(GROUP_REWARD):
            self.verifiers.submit_group(number, name, [item] * self.config.schedule.n_samples_per_prompt)
        else:
            self.verifiers.queue.append(item)

    def _judge(self, name: str, graded: list[tuple[Seen, Score]]) -> str:
        """What a verifier says of the reference answers; what is wrong goes to the findings."""
        if not graded:
            return f"{name}: no answer yet after {FIRST_S:g} s; the run waits reward.timeout_s"
        failed = [(one, bare(score.error, name)) for one, score in graded if score.error]
        given = [(one, score) for one, score in graded if not score.error]
        if not given:
            (one, error), all_of = failed[0], f" and all {len(failed)} that it was tried on" if len(failed) > 1 else ""
            mend = REWARD_MEND if error.startswith("returned") else "mend it, or the rows"
            if not right_response(name):
                mend += f"; it was given the label as the response, {name}'s attribute `example` can say what to give"
            self.found.objections.append(f"verifier {name!r} fails on {one.where}{all_of}: {mended(error, mend)}")
            return ""
        if failed:
            self.found.remarks.append(
                f"verifier {name!r} fails on {share(failed, graded)} by {last_line(failed[0][1])}; "
                "samples of such rows come to nothing: mend the labels, or the verifier"
            )
        first, score = given[0]
        if not right_response(name):
            return f"{name}: a response that is the label, of {first.where}, is worth {worth(score)}"
        wrong = [(one, score) for one, score in given if score.details.get("correct", score.reward or 0.0) <= 0]
        if wrong:
            self.found.remarks.append(
                f"verifier {name!r} does not find {share(wrong, graded)} right; mend the labels, or take another"
            )
        right = len(given) - len(wrong)
        return f"{name}: {right:,} of {len(graded):,} reference answers are right; the first is worth {worth(score)}"

    # --- agents, environment and filters --------------------------------------------------------------------------

    def _ask_environment(self, one: Seen) -> bytes | None:
        """The state behind a turn that is the reference answer, where that ends the response."""
        section = self.config.environment
        if not section.name or f"{ENVIRONMENTS.key!r}" in "".join(self.found.objections):
            return None
        text = one.row.label + "".join(section.turn_ends[:1])
        self.environment.submit(Call(0, text, 0, True, b"", prompt_text(one.row), one.row.label))
        answer: Answer | None = next(self._answers(self.environment, 0, lambda: False, lambda: None), None)
        if answer is None:
            self.found.facts["turns"] = f"{section.name} has not answered {text!r} in {FIRST_S:g} s"
            return None
        if not answer.error:
            done = ", and the response is over" if answer.done else ""
            self.found.facts["turns"] = f"{section.name} answers {text!r} by {answer.text[:200]!r}{done}"
            return answer.state if answer.done else None
        failed = f"environment {section.name!r} fails on the turn {text!r} of {one.where}: "
        if section.failure_text:
            self.found.remarks.append(
                f"{failed}{last_line(answer.error)}; the policy would read {section.failure_text!r}"
            )
        else:
            self.found.objections.append(failed + mended(answer.error, "mend it, or set environment.failure_text"))
        return None

    def _run_agent(self, one: Seen, tokenizer: Tokenizer, patience_s: float) -> None:
        """What goes wrong once the policy has said something is a remark: it says other things in the run."""
        agent = self.config.agent
        if not (agent.program or agent.command) or "'agent." in "".join(self.found.objections):
            return
        name = agent.program or " ".join(agent.command)
        ending = run_once(self.config, tokenizer, one, patience_s)
        if ending.error:
            what, _, way = ending.error.partition("\n")
            text = f"agent {name!r} fails on {one.where} after {counted(ending.turns, 'answer')}: {what}; mend it"
            (self.found.remarks if ending.turns else self.found.objections).append(f"{text}\n{way}".rstrip())
        else:
            returned = (
                "its verifier says what that is worth" if ending.reward is None else f"returned {ending.reward:g}"
            )
            asked = f"{name} asked {counted(ending.turns, 'time')} for {one.where}"
            self.found.facts["agent"] = f"{asked}; {returned if ending.over else 'it is still at work'}"

    def _ask_filters(self, score: Score | None) -> None:
        """On a group of which half is right."""
        n = self.config.schedule.n_samples_per_prompt
        rewards = [float(number % 2) for number in range(n)]
        details = dict(score.details) if score else {}
        group = CompleteGroup(rewards, [1] * n, ["stop"] * n, [details] * n, rewards)
        filters = self.found.passes(GroupFilters, self.config.schedule)
        for function in filters.filters if filters else ():
            name = getattr(function, "__name__", repr(function))
            said: list[Any] = []
            thread = threading.Thread(target=try_filter, args=(function, group, said), daemon=True)
            thread.start()
            thread.join(FILTER_S)
            failure = said[0] if said else FilterFailed(f"the filter {name} gave no answer within {FILTER_S:g} s")
            if isinstance(failure, FilterFailed):
                way = f"\n{raised(failure.__cause__)}" if failure.__cause__ else ""
                self.found.objections.append(f"key 'schedule.group_filter': {failure}; mend it{way}")
            elif self.config.schedule.group_filter:
                text = f"discards as {said[0]!r}" if said[0] else "keeps"
                self.found.facts["filter"] = f"{name} {text} a group of which every second response is worth 1"


def try_filter(function, group: CompleteGroup, said: list[Any]) -> None:
    try:
        said.append(ask(function, group))
    except FilterFailed as error:
        said.append(error)


def mended(error: str, mend: str) -> str:
    """A sentence; of an exception its last line is in it, and the traceback behind it."""
    return f"{last_line(error)}; {mend}" + (f"\n{error}" if "\n" in error else "")


def bare(error: str | None, name: str) -> str:
    """Without what the sentence around it says already."""
    return (error or "").removeprefix(f"verifier {name!r}: ")


def last_line(error: str) -> str:
    return error.rpartition("\n")[2]


def share(some: Sequence[tuple[Seen, Any]], of: Sequence[Any]) -> str:
    one = some[0][0]
    return f"{len(some)} of {len(of)} reference answers, the first {one.row.label[:80]!r} of {one.where},"


def worth(score: Score) -> str:
    details = ", ".join(f"{key} {value:g}" for key, value in score.details.items())
    return f"{score.reward:g}" + (f" ({details})" if details else "")
