"""Scoring of leased responses by verifier processes, for workers and scorers, and a scorer's loop."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from april import wire
from april.config import Config
from april.config.teachers import shows_feedback
from april.data.dataset import verifier_of
from april.data.rows import may_name
from april.data.tokenizer import Tokenizer
from april.util.logs import Failures
from april.util.pulse import MAIN
from april.util.text import cut_in_middle
from april.wire.limits import MAX_FEEDBACK_CHARACTERS, MAX_TOKEN_SCORE_BYTES
from april.wire.sockets.broker import BrokerConnection
from april.workers.reports import Reports
from april.workers.rewards.messages import GroupScore, Item, RewardPart, RewardRules, Score
from april.workers.rewards.pool import RewardPool
from april.workers.teachers.pool import Teachers

log = logging.getLogger(__name__)


class LeasedTask(NamedTuple):
    """A lease that the broker has granted, with its task (prompt and verifier) and its token ids."""

    grant: wire.Grant
    task: wire.Task
    tokens: list[np.ndarray]
    """int32 arrays: the prompt, then the response's pieces in order. Of a group lease (`grant.group_scored`): the
    prompt, then one whole response for each sample of the group. The forks of agents' sessions (`grant.forks`) are
    last."""


def leases_of(received: wire.Received) -> Iterator[LeasedTask]:
    """The leases of a `Grants` message, each with its task and token arrays."""
    grants, arrays = received.message, received.arrays
    offset = len(grants.tasks)
    for grant in grants.grants:
        yield LeasedTask(
            grant,
            grants.tasks[grant.task_index],
            [arrays[grant.task_index], *arrays[offset : offset + grant.responses]],
        )
        offset += grant.responses


class Scoring:
    """The verifier processes and teachers of a worker or scorer. `start_now`: whether the verifier processes start at
    once, or with the first response.

        scoring.submit(LeasedTask(grant, task, [prompt, *pieces of the response]), "stop")
        for score in scoring.poll():                      # never waits
            connection.send(closing(score, length))
    """

    def __init__(self, config: Config, tokenizer: Tokenizer, start_now: bool = True):
        self.config = config
        self.tokenizer = tokenizer
        self.rules = reward_rules(config)
        self.pool: RewardPool | None = None
        self.teachers = Teachers(config)
        self._unverified: list[Score] = []
        """Scores, not yet returned by `poll`, for which this process calls no verifier: the broker has the reward
        already, or this process's configuration does not permit the verifier, and the score is an error."""
        if start_now:
            self._start()

    def _start(self) -> RewardPool:
        output_file = verifier_output_file(self.config)
        self.pool = RewardPool(self.config.reward.processes, self.rules, output_file)
        return self.pool

    @property
    def pending(self) -> int:
        """Number of submitted leases that are not scored yet."""
        return len(self._unverified) + self.teachers.pending + (self.pool.pending if self.pool else 0)

    def submit(self, lease: LeasedTask, finish_reason: str, state: bytes | None = None, turns: int = 0) -> None:
        """Queue a response, or all responses of a group, for scoring.

        `finish_reason`: that of the response; the responses of a group take theirs from the grant. `state`: final state
        of the environment (MessagePack); None takes the grant's. `turns`: number of turns that the policy has taken; 0
        takes the grant's. A verifier that this process's own configuration does not permit is not imported: its score
        is an error, so that no other process in the broker's place chooses what code runs here.
        """
        grant, task, tokens = lease
        end = len(tokens) - len(grant.forks)
        prompt_ids, pieces, forks = tokens[0], tokens[1:end], tokens[end:]
        whole = pieces if grant.group_scored else [np.concatenate(pieces)]
        known = task.reward in self.rules.verifiers or may_name(task.reward, self.config.reward.allowed)
        if not (known or grant.rewarded):
            why = f"verifier {task.reward!r} is not in the configuration of this process; start it with the run's"
            return self._unverified.append(Score(grant.lease_id, None, why))
        if task.teacher:
            self.teachers.submit(grant.lease_id, task.teacher, prompt_ids, forks or whole, grant.forks)
        if grant.rewarded:  # the broker keeps the reward that it has
            return self._unverified.append(Score(grant.lease_id, 0.0))
        pool, prompt = self.pool or self._start(), self.tokenizer.decode(prompt_ids)

        def item_of(key: int, response: np.ndarray, reason: str, state: bytes, turns: int = 0) -> Item:
            text = response_text(self.config, self.tokenizer, task.reward, response)
            length, asked, budget = len(response), task.row_prompt, task.max_response_tokens
            return Item(key, task.reward, text, task.label, reason, prompt, length, state, 0, asked, turns, budget)

        if grant.group_scored:
            responses = zip(whole, grant.group_scored, states_of(grant), strict=True)
            items = [item_of(index, *response) for index, response in enumerate(responses)]
            return pool.submit_group(grant.lease_id, task.reward, items)
        state = grant.state if state is None else state
        [response] = whole
        turns = turns or grant.turns + (grant.turn_start < len(response) or not grant.turns)
        pool.put(item_of(grant.lease_id, response, finish_reason, state, turns))

    def poll(self) -> list[Score | GroupScore]:
        """Scores that have arrived since the last call; a score's key is its lease id."""
        unverified, self._unverified = self._unverified, []
        return self.teachers.joined([*unverified, *(self.pool.poll() if self.pool else [])])

    def close(self) -> None:
        self.teachers.close()
        if self.pool:
            self.pool.close()


def response_text(config: Config, tokenizer: Tokenizer, verifier: str, response: np.ndarray) -> str:
    """Text of a response, token ids int32 [T], for the named verifier: without special tokens if
    `reward.without_special_tokens` names it."""
    keep_special = verifier not in config.reward.without_special_tokens
    return tokenizer.response_text(response, keep_special, config.sampling.stop_token_ids)


def states_of(grant: wire.Grant) -> list[bytes]:
    """Final environment state of each response of a group lease, MessagePack; empty bytes without an environment."""
    if not grant.state:
        return [b""] * len(grant.group_scored)
    return msgspec.msgpack.decode(grant.state, type=list[bytes])


def verifier_output_file(config: Config) -> Path | None:
    """File for the output of verifiers, shared by this machine's workers: logs/rewards.log of the run folder.

    None where there is no logs folder; verifiers then write to the worker's own output.
    """
    logs = config.run_dir / "logs"
    return logs / "rewards.log" if logs.is_dir() else None


def closing(score: Score | GroupScore, length: int = 0) -> wire.Closing:
    """The message that ends the lease of a score: `Scored`, `TokenScored` if the score has numbers for each token or a
    feedback text, or `GiveBack` if there is no reward or these numbers take too many bytes.

    `length`: response tokens that this process has generated or received; 0 for a scorer.
    """
    if isinstance(score, Score) and score.reward is None:
        return wire.GiveBack(score.key, length, "scoring_failed", score.error or "no reward")
    if (size := len(token_values(score))) > MAX_TOKEN_SCORE_BYTES:
        why = f"its token scores take {size} bytes, more than the {MAX_TOKEN_SCORE_BYTES} that a score may have"
        return wire.GiveBack(score.key, length, "scoring_failed", why)
    scores = score.scores if isinstance(score, GroupScore) else [score]
    rewards, details = [item.reward for item in scores if item.reward is not None], [item.details for item in scores]
    most = MAX_FEEDBACK_CHARACTERS // len(scores)
    feedback = [cut_in_middle(item.feedback, most) for item in scores] if any(item.feedback for item in scores) else []
    if not (size or feedback):
        return wire.Scored(score.key, rewards, details)
    columns = [{name: len(data) // 4 for name, data in column.items()} for column in columns_of(score)]
    return wire.TokenScored(score.key, rewards, details, columns=columns, feedback=feedback)


def token_values(score: Score | GroupScore) -> bytes:
    """The numbers of all token scores as float32 bytes, response by response; empty without token scores."""
    return b"".join(data for columns in columns_of(score) for data in columns.values())


def columns_of(score: Score | GroupScore) -> list[dict[str, bytes]]:
    """For each response its token scores: name -> one number for each token or turn, as float32 bytes. Of agents'
    sessions, for each fork instead."""
    scores = score.scores if isinstance(score, GroupScore) else [score]
    return score.forks or [item.token_scores for item in scores]


def reward_rules(config: Config) -> RewardRules:
    section = config.reward
    named = {field: getattr(section, field) for field in RewardRules.__struct_fields__ if hasattr(section, field)}
    verifiers = {*section.asked(section.name), *section.allowed, *filter(None, map(verifier_of, config.sources))}
    return RewardRules(
        max_response_tokens=config.sampling.max_response_tokens,
        verifiers=tuple(sorted(verifiers)),
        has_sessions=config.agent.is_set,
        feedback=section.feedback_characters if shows_feedback(config.algorithm) else 0,
        parts={name: RewardPart(**part.model_dump()) for name, part in section.part.items()},
        **named,
    )


# --- the scorer -------------------------------------------------------------------------------------------------------

IDLE_POLL_MS = 20
BUSY_POLL_MS = 5


class Scorer:
    """Scores the responses that the broker leases to it, until the broker says stop."""

    def __init__(self, config: Config, connection: BrokerConnection):
        self.config = config
        self.connection = connection
        self.scoring = Scoring(config, Tokenizer(config.model.path))
        self.reports = Reports(connection)
        self.leases: set[int] = set()
        """Ids of the leases that this scorer holds: the broker has not yet confirmed that their scores are on disk."""
        self.failures = Failures(log)
        self.scores = 0
        """Number of scores reported so far, failed ones included."""
        self.stopping = ""

    def run(self) -> None:
        """Work until the broker says stop. Raises BrokerUnreachable when it is gone for good."""
        self._say_hello()
        while not self.stopping:
            self.run_once()
        log.info("stopping: %s", self.stopping)
        self.connection.goodbye()

    def stop(self, reason: str) -> None:
        """Leave after the current pass of the loop, for the `reason`; unscored leases go to other scorers."""
        self.stopping = reason

    def run_once(self) -> None:
        """Run one pass of the loop: handle the broker's messages, then report new scores."""
        MAIN.at("messages")
        for received in self.connection.receive(BUSY_POLL_MS if self.scoring.pending else IDLE_POLL_MS):
            self._handle(received)
        self.connection.check_alive()
        MAIN.at("handing in")
        for score in self.scoring.poll():
            self._report_score(score)
        self.reports.send()
        self.connection.hold(self.leases)

    def close(self) -> None:
        self.scoring.close()
        self.connection.close()

    def _say_hello(self) -> None:
        welcome = self.connection.hello(list(self.leases))
        for lease_id in welcome.lost_lease_ids:
            self._drop(lease_id)
        self.connection.send(wire.HolderCapacity(self.config.scorer.leases))
        for lease_id in self.leases:
            self.reports.send_again(lease_id)

    def _handle(self, received: wire.Received) -> None:
        message = received.message
        match message:
            case wire.Grants():
                for lease in leases_of(received):
                    self.leases.add(lease.grant.lease_id)
                    self.scoring.submit(lease, lease.grant.finish_reason)
            case wire.Answers():
                for lease_id, reason in message.rejects:
                    log.warning("refused: %s", reason)
                    self._drop(lease_id)
                for lease_id in message.done:
                    self._drop(lease_id)
            case wire.Cancel(lease_ids) | wire.Renewed(lease_ids):
                for lease_id in lease_ids:
                    self._drop(lease_id)
            case wire.Stop():
                self.stop(message.reason)
            case wire.Refused() if self.connection.is_disowned(received):
                self._say_hello()
            case wire.Refused() if "unknown session" not in message.reason:
                log.warning("refused: %s", message.reason)
                for lease_id in self.reports.unanswered():
                    self._drop(lease_id)

    def _report_score(self, score: Score | GroupScore) -> None:
        """Report a score; ignored if its lease has ended meanwhile."""
        if score.key not in self.leases:
            return
        ending = closing(score)
        if isinstance(ending, wire.GiveBack):
            self.failures.note(ending.cause, ending.error, "a response or group goes back")
        self.scores += 1
        self.reports.close(ending, token_values(score) if isinstance(ending, wire.TokenScored) else b"")

    def _drop(self, lease_id: int) -> None:
        self.leases.discard(lease_id)
        self.reports.forget(lease_id)
