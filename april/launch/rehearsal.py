"""Tries a run's verifiers, environment, agent and filters once before it starts; verifiers grade the reference answers.

All but the filters run in processes of their own, as in a run.
"""

import asyncio
import tempfile
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import orjson

from april import wire
from april.agents.conversation_tree import ConversationTree
from april.agents.gateway import Gateway, task_of
from april.agents.host import StartProgram
from april.agents.programs import CommandRunner, NotStarted, ProgramRunner, Runner
from april.agents.rendering import Renderer
from april.broker.filters import CompleteGroup, FilterFailed, GroupFilters, ask
from april.config import Config, ConfigError
from april.config.teachers import shows_feedback
from april.data.rows import row_prompt
from april.data.tokenizer import Tokenizer
from april.launch.findings import Findings
from april.launch.row_checks import InspectedRow, prompt_text
from april.util.logs import user_traceback
from april.util.pool import ProcessPool
from april.util.text import GROUP_REWARD, counted
from april.wire.message import Version
from april.wire.rows import chunk_row
from april.workers.environments import ENVIRONMENTS
from april.workers.environments.process import EnvironmentAnswer, EnvironmentCall, EnvironmentPool, EnvironmentRules
from april.workers.rewards.messages import GroupScore, Item, Score
from april.workers.rewards.pool import RewardPool
from april.workers.rewards.verifiers import check_verifier, reads_state, right_response
from april.workers.scoring import response_text, reward_rules

# --- agent ------------------------------------------------------------------------------------------------------------

SESSION_KEY = 1
NO_GROUP = -1
"""Group id that tells a program that this session is no sample of a run."""
FIRST_REQUEST_S = 60.0
"""Longest wait for the program's first request (seconds); after that, its own work may legitimately take long."""
AGENT_POLL_S = 0.02
LOG_CHARACTERS = 2000


@dataclass
class AgentOutcome:
    """Outcome of an agent program's trial session; implements the callbacks of the program runner."""

    turns: int = 0
    """Number of the program's requests that were answered."""
    reward: float | None = None
    error: str = ""
    is_over: bool = False
    """Whether the program has ended; otherwise it was still running at the end of the wait."""

    def program_started(self, key: int) -> None:
        pass

    def program_ended(
        self, key: int, reward: float | None, error: str, state: bytes = b"", details: dict[str, float] | None = None
    ) -> None:
        self.reward, self.error = reward, error
        self.is_over = True

    def process_died(self, keys: list[int], why: str) -> None:
        self.program_ended(SESSION_KEY, None, why)

    def runner_failed(self, why: str) -> None:
        self.program_ended(SESSION_KEY, None, why)


def run_agent_once(config: Config, tokenizer: Tokenizer, inspected: InspectedRow, patience_s: float) -> AgentOutcome:
    """Run the agent program on one row, against a policy that always replies with the row's label. `patience_s`:
    longest wait for the program's end once it has made a request."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "programs.log")
        outcome = asyncio.run(run_session(config, tokenizer, inspected, log, patience_s))
        if outcome.error and log.exists():
            outcome.error = (
                f"{outcome.error.partition('; ')[0]}\n{log.read_text(errors='replace')[-LOG_CHARACTERS:].strip()}"
            )
    return outcome


async def run_session(
    config: Config, tokenizer: Tokenizer, inspected: InspectedRow, log: Path, patience_s: float
) -> AgentOutcome:
    from aiohttp import web

    section, sampling, outcome = config.agent, config.sampling, AgentOutcome()
    gateway, renderer = Gateway.of(config, tokenizer), Renderer.of(config, tokenizer)
    prompt, label = orjson.dumps(inspected.dataset_row.prompt).decode(), inspected.dataset_row.label
    description = wire.AgentSession(
        SESSION_KEY, NO_GROUP, 0, False, prompt, label, sampling.max_response_tokens, sampling.temperature
    )
    answer = np.append(tokenizer.encode_prompt(label), np.int32(tokenizer.end_of_text))

    def say(lease_id: int, start: int, tokens: np.ndarray, request: wire.TurnRequest, parent: int) -> None:
        ids = answer[: request.max_tokens].astype("<i4")
        payload = ids.tobytes() + bytes(4 * len(ids))
        row = chunk_row(lease_id, start + len(tokens), len(ids), Version(0, 0), "stop", payload)
        asyncio.get_running_loop().call_soon(session.receive_rows, [(row, payload)])
        outcome.turns += 1

    session = ConversationTree(description, renderer, say, section.max_turn_tokens, section.history == "template")
    http = web.AppRunner(gateway.app, access_log=None, handler_cancellation=True)
    await http.setup()
    await web.TCPSite(http, "127.0.0.1", 0).start()
    runner: Runner = (
        ProgramRunner(section.program, section.options, 1, outcome)
        if section.program
        else CommandRunner(section.command, log, outcome)
    )
    try:
        await runner.start()
        base_url = f"http://127.0.0.1:{http.addresses[0][1]}/v1"
        runner.start_program(
            StartProgram(SESSION_KEY, base_url, gateway.admit(session), task_of(session), False, base_url)
        )
        began = time.monotonic()
        while not outcome.is_over and time.monotonic() - began < (patience_s if outcome.turns else FIRST_REQUEST_S):
            await asyncio.sleep(AGENT_POLL_S)
    except NotStarted as error:
        outcome.program_ended(SESSION_KEY, None, f"its process did not start: {error}")
    finally:
        await runner.close()
        await http.cleanup()
    return outcome


# --- rehearsal --------------------------------------------------------------------------------------------------------

POLL_S = 0.001
MAX_QUEUED_ROWS = 64
"""Maximum number of rows queued for a verifier; further rows are prepared later."""
FILTER_TIMEOUT_S = 10.0
"""Time limit of one call of a filter (seconds); in a run such a call blocks the broker's loop."""
WRONG_RESPONSE = "I do not know."
"""Response that is given to verifiers to see whether they give feedback."""
REWARD_MEND = "return a number, or a number and a dictionary of numbers"
STARTING_S, DRY_S = 0.3, 20.0
"""Time for grading beyond the first row of each verifier (seconds), at the start of a run and in a dry run."""
FIRST_ANSWER_S = 15.0
"""Time for the first answer of each verifier or of the environment, in addition to the time for all rows (seconds). A
call that a run would permit may be slower, since its time limit is a key of the configuration."""


class Rehearsal:
    """Tries user-defined functions on some rows. Its processes start at once, and are up when the rows have been read.

    with Rehearsal(config, found) as rehearsal:
        rehearsal.try_rows(rows, tokenizer, patience_s)
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

    def try_rows(self, rows: list[InspectedRow], tokenizer: Tokenizer, patience_s: float) -> None:
        """Try all functions and record the results: a failure on every row is an error, on some rows a warning.
        `patience_s`: time for grading further rows than the first of each verifier (seconds)."""
        state = self._ask_environment(rows[0])
        by_verifier: dict[str, list[int]] = defaultdict(list)
        for index, row in enumerate(rows):
            by_verifier[row.dataset_row.reward or self.config.reward.name].append(index)
        by_verifier = {name: indices for name, indices in by_verifier.items() if self._is_usable(name)}
        if self.config.environment.name:
            by_verifier = {name: indices[:1] for name, indices in by_verifier.items()}
        if state is None and (self.config.environment.name or self.config.agent.is_set):
            by_verifier = {name: indices for name, indices in by_verifier.items() if not reads_state(name)}
        scores = self._grade(by_verifier, rows, tokenizer, state or b"", patience_s)
        graded = {
            name: [(rows[index], scores[index]) for index in indices if index in scores]
            for name, indices in by_verifier.items()
        }
        sentences = [self._judge(name, of_verifier) for name, of_verifier in graded.items()]
        self.found.facts["rewards"] = "\n".join(filter(None, sentences))
        for name, indices in by_verifier.items():
            of_verifier = [scores[key] for key in (*indices, ~indices[0]) if key in scores]
            if ~indices[0] in scores and not any(score.feedback for score in of_verifier):
                self.found.warnings.append(
                    f"key 'algorithm.hint' shows {{feedback}}, and verifier {name!r} says nothing of "
                    f"{counted(len(of_verifier), 'response')}, a wrong one among them; samples without feedback learn "
                    "nothing from the divergence: return a text as the detail 'feedback', or leave {feedback} out"
                )
        self._run_agent(rows[0], tokenizer, patience_s)
        self._ask_filters(next(iter(scores.values()), None))

    def _is_usable(self, name: str) -> bool:
        """Whether the verifier `name` can be imported and asked; if not, `check_run` has recorded the error before."""
        try:
            check_verifier(name, url=self.config.reward.url)
        except ConfigError:
            return False
        return True

    # --- verifiers ------------------------------------------------------------------------------------------------

    def _grade(
        self,
        by_verifier: dict[str, list[int]],
        rows: list[InspectedRow],
        tokenizer: Tokenizer,
        state: bytes,
        patience_s: float,
    ) -> dict[int, Score]:
        """Scores by row index: of each verifier's first row, and of as many other rows as `patience_s` allows.
        `by_verifier`: indices into `rows` by verifier; `state`: the environment's final state. If a prompt can show
        feedback, a wrong response to each first row i is scored as well, under the key ~i."""
        first = {indices[0] for indices in by_verifier.values()}
        others = [index for indices in by_verifier.values() for index in indices[1:]]
        names = {index: name for name, indices in by_verifier.items() for index in indices}
        wrong = [~index for index in sorted(first)] if shows_feedback(self.config.algorithm) else []
        waiting, scores = deque((*sorted(first), *wrong, *sorted(others))), dict[int, Score]()

        def submit_more() -> None:
            while waiting and len(self.verifiers.queue) < MAX_QUEUED_ROWS:
                key = waiting.popleft()
                index = key if key >= 0 else ~key
                self._submit(key, names[index], rows[index], tokenizer, state)

        submit_more()
        for answer in self._answers(self.verifiers, patience_s, lambda: first <= scores.keys(), submit_more):
            scores[answer.key] = answer.scores[0] if isinstance(answer, GroupScore) else answer
        return scores

    def _answers(
        self, pool: ProcessPool, patience_s: float, enough: Callable[[], bool], submit_more: Callable[[], None]
    ) -> Iterator[Any]:
        """Yield answers of a pool until it is idle or the time is over: `patience_s` from the moment at which its first
        process is ready, and `FIRST_ANSWER_S` more as long as `enough()` is false. `submit_more` is called after each
        poll."""
        up, began = False, time.monotonic()
        while pool.pending and time.monotonic() - began < patience_s + (0 if enough() else FIRST_ANSWER_S):
            yield from pool.poll()
            submit_more()
            if not up:
                up, began = pool.processes[0].ready, time.monotonic()
            time.sleep(POLL_S)

    def _submit(self, index: int, name: str, row: InspectedRow, tokenizer: Tokenizer, state: bytes) -> None:
        label = row.dataset_row.label
        example = right_response(name)
        response = WRONG_RESPONSE if index < 0 else example(label) if example else label
        prompt = tokenizer.decode(row.tokens) if len(row.tokens) else prompt_text(row.dataset_row)
        tokens = tokenizer.encode_prompt(response)
        expressed = tokenizer.decode(tokens, keep_special=True) == response
        text = response_text(self.config, tokenizer, name, tokens) if expressed else response
        turns = 0 if name.startswith(GROUP_REWARD) else 1
        raw_prompt = row_prompt(row.dataset_row, self.config.reward.asked(name))
        item = Item(index, name, text, label, "stop", prompt, len(tokens), state, row_prompt=raw_prompt, turns=turns)
        if name.startswith(GROUP_REWARD):
            self.verifiers.submit_group(index, name, [item] * self.config.schedule.n_samples_per_prompt)
        else:
            self.verifiers.put(item)

    def _judge(self, name: str, graded: list[tuple[InspectedRow, Score]]) -> str:
        """Sentence about the scores that the verifier `name` gave the reference answers; records errors and warnings.
        `graded`: (row, score of its reference answer)."""
        if not graded:
            return f"{name}: no answer yet after {FIRST_ANSWER_S:g} s; the run waits reward.timeout_s"
        failed = [(row, without_prefix(score.error, name)) for row, score in graded if score.error]
        given = [(row, score) for row, score in graded if not score.error]
        if not given:
            (row, error), all_of = failed[0], f" and all {len(failed)} that it was tried on" if len(failed) > 1 else ""
            fix = REWARD_MEND if error.startswith("returned") else "fix it, or the rows"
            if not right_response(name):
                fix += f"; it was given the label as the response, {name}'s attribute `example` can say what to give"
            self.found.errors.append(f"verifier {name!r} fails on {row.where}{all_of}: {with_fix(error, fix)}")
            return ""
        if failed:
            self.found.warnings.append(
                f"verifier {name!r} fails on {share_of(failed, graded)} by {last_line(failed[0][1])}; "
                "samples of such rows come to nothing: fix the labels, or the verifier"
            )
        first, score = given[0]
        if not right_response(name):
            return f"{name}: a response that is the label, of {first.where}, is worth {worth(score)}"
        wrong = [(row, score) for row, score in given if score.details.get("correct", score.reward or 0.0) <= 0]
        if wrong:
            self.found.warnings.append(
                f"verifier {name!r} does not find {share_of(wrong, graded)} right; fix the labels, or take another"
            )
        right = len(given) - len(wrong)
        return f"{name}: {right:,} of {len(graded):,} reference answers are right; the first is worth {worth(score)}"

    # --- agents, environment and filters --------------------------------------------------------------------------

    def _ask_environment(self, row: InspectedRow) -> bytes | None:
        """Try the environment with the row's reference answer as the policy's turn. Returns the environment's final
        state if its answer ends the response, otherwise None."""
        section = self.config.environment
        if not section.name or f"{ENVIRONMENTS.key!r}" in "".join(self.found.errors):
            return None
        text = row.dataset_row.label + "".join(section.turn_ends[:1])
        self.environment.submit(
            EnvironmentCall(0, text, 0, True, b"", prompt_text(row.dataset_row), row.dataset_row.label)
        )
        answer: EnvironmentAnswer | None = next(self._answers(self.environment, 0, lambda: False, lambda: None), None)
        if answer is None:
            self.found.facts["turns"] = f"{section.name} has not answered {text!r} in {FIRST_ANSWER_S:g} s"
            return None
        if not answer.error:
            done = ", and the response is over" if answer.done else ""
            self.found.facts["turns"] = f"{section.name} answers {text!r} by {answer.text[:200]!r}{done}"
            return answer.state if answer.done else None
        failed = f"environment {section.name!r} fails on the turn {text!r} of {row.where}: "
        if section.failure_text:
            self.found.warnings.append(
                f"{failed}{last_line(answer.error)}; the policy would read {section.failure_text!r}"
            )
        else:
            self.found.errors.append(failed + with_fix(answer.error, "fix it, or set environment.failure_text"))
        return None

    def _run_agent(self, row: InspectedRow, tokenizer: Tokenizer, patience_s: float) -> None:
        """Try the agent's program. A failure after a reply of the policy is only a warning: the real policy gives other
        replies. `patience_s`: longest wait for the program's end after its first request (seconds)."""
        agent = self.config.agent
        if not (agent.program or agent.command) or "'agent." in "".join(self.found.errors):
            return
        name = agent.program or " ".join(agent.command)
        outcome = run_agent_once(self.config, tokenizer, row, patience_s)
        if outcome.error:
            failure, _, traceback = outcome.error.partition("\n")
            text = f"agent {name!r} fails on {row.where} after {counted(outcome.turns, 'answer')}: {failure}; fix it"
            (self.found.warnings if outcome.turns else self.found.errors).append(f"{text}\n{traceback}".rstrip())
        else:
            returned = (
                "its verifier says what that is worth" if outcome.reward is None else f"returned {outcome.reward:g}"
            )
            asked = f"{name} asked {counted(outcome.turns, 'time')} for {row.where}"
            self.found.facts["agent"] = f"{asked}; {returned if outcome.is_over else 'it is still at work'}"

    def _ask_filters(self, score: Score | None) -> None:
        """Try the filters on a group in which half of the rewards are 1 and half 0. `score`: its details become those
        of the group's samples; None: they have none."""
        n = self.config.schedule.n_samples_per_prompt
        rewards = [float(index % 2) for index in range(n)]
        details = dict(score.details) if score else {}
        group = CompleteGroup(rewards, [1] * n, ["stop"] * n, [details] * n, rewards)
        filters = self.found.run_check(GroupFilters, self.config.schedule)
        for function in filters.filters if filters else ():
            name = getattr(function, "__name__", repr(function))
            outcomes: list[Any] = []
            thread = threading.Thread(target=try_filter, args=(function, group, outcomes), daemon=True)
            thread.start()
            thread.join(FILTER_TIMEOUT_S)
            failure = (
                outcomes[0]
                if outcomes
                else FilterFailed(f"the filter {name} gave no answer within {FILTER_TIMEOUT_S:g} s")
            )
            if isinstance(failure, FilterFailed):
                traceback = f"\n{user_traceback(failure.__cause__)}" if failure.__cause__ else ""
                self.found.errors.append(f"key 'schedule.group_filter': {failure}; fix it{traceback}")
            elif self.config.schedule.group_filter:
                text = f"discards as {outcomes[0]!r}" if outcomes[0] else "keeps"
                self.found.facts["filter"] = f"{name} {text} a group of which every second response is worth 1"


def try_filter(function, group: CompleteGroup, outcomes: list[Any]) -> None:
    try:
        outcomes.append(ask(function, group))
    except FilterFailed as error:
        outcomes.append(error)


def with_fix(error: str, fix: str) -> str:
    """The error and its fix as a sentence, followed by the traceback if there is one."""
    return f"{last_line(error)}; {fix}" + (f"\n{error}" if "\n" in error else "")


def without_prefix(error: str | None, name: str) -> str:
    """The error of the verifier `name` without its beginning "verifier 'NAME': ", which the sentence around it has; ""
    for None."""
    return (error or "").removeprefix(f"verifier {name!r}: ")


def last_line(error: str) -> str:
    return error.rpartition("\n")[2]


def share_of(some: Sequence[tuple[InspectedRow, Any]], of: Sequence[Any]) -> str:
    row = some[0][0]
    return f"{len(some)} of {len(of)} reference answers, the first {row.dataset_row.label[:80]!r} of {row.where},"


def worth(score: Score) -> str:
    details = ", ".join(f"{key} {value:g}" for key, value in score.details.items())
    return f"{score.reward:g}" + (f" ({details})" if details else "")
