"""The teachers of a scorer. They are asked while the verifiers work, so that a response's score has its reward and its
teacher's log-probabilities. If a teacher fails, the score is an error, and the response is scored again."""

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from april.config import Config
from april.config.teachers import top_k_score
from april.util.pool import PoolProcess, ProcessPool
from april.workers.rewards.messages import GroupScore, Score
from april.workers.teachers.messages import TeacherAnswer, TeacherItem, TeacherRules

AnyScore = Score | GroupScore


class TeacherPool(ProcessPool[TeacherItem, TeacherAnswer]):
    """Processes that ask one teacher."""

    def __init__(self, config: Config, name: str):
        self.rules = rules_of(config, name)
        super().__init__(config.teacher[name].processes)

    def start_process(self) -> PoolProcess:
        return PoolProcess("april.workers.teachers.process", self.rules, self.rules.timeout_s, TeacherAnswer)

    def charge(self, item: TeacherItem, failure: str) -> TeacherAnswer:
        return TeacherAnswer(item.key, error=f"teacher {self.rules.name!r}: {failure}")


def rules_of(config: Config, name: str) -> TeacherRules:
    section = config.teacher[name]
    return TeacherRules(
        name, section.kind, str(section.path), section.url, section.url_key_variable, section.model, section.device,
        section.timeout_s, section.top_k, config.vocabulary or 0,
    )  # fmt: skip


class Teachers:
    """All teachers of a scorer. A pool starts with the first response for its teacher.

    teachers.submit(key, "big", prompt, [response])
    scores = teachers.joined(verifiers.poll())       # those that have both by now; never waits
    """

    def __init__(self, config: Config):
        self.config = config
        self._pools: dict[str, TeacherPool] = {}
        self._asked: dict[int, str] = {}
        """Scores that still lack the verifiers' numbers or the teacher's: key of the score -> name of its teacher."""
        self._scores: dict[int, AnyScore] = {}
        self._answers: dict[int, TeacherAnswer] = {}

    @property
    def pending(self) -> int:
        """Number of scores that have come from the verifiers and wait for their teacher."""
        return len(self._scores)

    def submit(
        self, key: int, name: str, prompt: np.ndarray, responses: Sequence[np.ndarray], starts: Sequence[int] = ()
    ) -> None:
        """Ask the teacher `name` for the log-probabilities of responses, int32 [R] each, to a prompt, int32 [P]. `key`:
        key of the score to which they belong. `starts`: index of the first token to be scored in each response; empty:
        0 for all. Does not wait."""
        pool = self._pools.get(name)
        if pool is None:
            pool = self._pools[name] = TeacherPool(self.config, name)
        self._asked[key] = name
        ids = [np.asarray(response, "<i4").tobytes() for response in responses]
        pool.put(TeacherItem(key, np.asarray(prompt, "<i4").tobytes(), ids, list(starts)))

    def joined(self, scores: Sequence[AnyScore]) -> list[AnyScore]:
        """Take the `scores` that have come from the verifiers, and return all that are complete now. Complete are
        scores without a teacher, scores with an error, and those whose teacher has answered, with its log-probabilities
        added."""
        complete = [score for score in scores if score.key not in self._asked]
        self._scores |= {score.key: score for score in scores if score.key in self._asked}
        answers = [answer for pool in self._pools.values() for answer in pool.poll()]
        self._answers |= {answer.key: answer for answer in answers if answer.key in self._asked}
        for key, score in list(self._scores.items()):
            answer, failed = self._answers.get(key), isinstance(score, Score) and score.reward is None
            if answer or failed:
                name = self._asked.pop(key)
                del self._scores[key]
                self._answers.pop(key, None)
                complete.append(score if failed or answer is None else with_column(score, name, answer))
        return complete

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


def with_column(score: AnyScore, name: str, answer: TeacherAnswer) -> AnyScore:
    """The score with a teacher's log-probabilities as the token score `name` (one number for each token), and the
    teacher's likeliest ids, if it gives them, as a further token score. An error if the teacher has failed. For agents'
    sessions each fork gets these."""
    if answer.error:
        return Score(score.key, None, answer.error)
    told = [{name: data} for data in answer.columns]
    told = [one | {top_k_score(name): top} for one, top in zip(told, answer.tops, strict=True)] if answer.tops else told
    if len(told) != (len(score.scores) if isinstance(score, GroupScore) else 1):
        return replace(score, forks=told)
    if isinstance(score, Score):
        return replace(score, token_scores={**score.token_scores, **told[0]})
    pairs = zip(score.scores, told, strict=True)
    return GroupScore(score.key, [replace(one, token_scores={**one.token_scores, **own}) for one, own in pairs])
