"""Teachers that are servers: one request for each text, answered with the log-probability of each of its ids.

An answer about other ids than those that were asked for is refused. Secrets stand in environment variables of this
process, whose names the configuration has.
"""

import time
from typing import Any, NamedTuple
from urllib.request import Request

import msgspec
import numpy as np

from april.workers.rewards.remote import TRIES_SHARE, post, secret
from april.workers.teachers.messages import TeacherError, TeacherRules


class ScoredToken(NamedTuple):
    """A token of a text as a server scores it."""

    logprob: float | None
    """Log-probability given the tokens before it, at temperature 1; None for the first token."""
    id: int | None = None
    """Id that was scored; None if the server does not tell."""
    text: str | None = None
    """Text of the token by the server's tokeniser; None if the server does not tell."""


class ServerTeacher:
    """A teacher at `rules.url`."""

    is_server = True

    def __init__(self, rules: TeacherRules):
        self.rules = rules

    def scored(self, ids: list[int]) -> list[ScoredToken]:
        """The tokens of a text as the server scores them. Raises RemoteError, or LookupError for other fields."""
        raise NotImplementedError

    def __call__(self, ids: np.ndarray) -> np.ndarray:
        """Log-probabilities of ids 1 to T - 1; int32 [T] -> float64 [T - 1]. Raises TeacherError, RemoteError."""
        scored = self.scored(ids.tolist())
        if len(scored) != len(ids):
            raise TeacherError(f"the server scored {len(scored)} tokens where {len(ids)} were asked for")
        for asked, token in zip(ids.tolist(), scored, strict=True):
            if token.id not in (None, asked):
                raise TeacherError(f"the server scored another text: token {token.id} where {asked} was asked for")
        return np.array([np.nan if token.logprob is None else token.logprob for token in scored[1:]])

    def ask(self, path: str, **body: Any) -> Any:
        """The server's answer to a request. Raises RemoteError."""
        url = self.rules.url.rstrip("/") + path
        body |= {"model": self.rules.model} if self.rules.model else {}
        request = Request(url, msgspec.json.encode(body), {"Content-Type": "application/json"})
        if self.rules.url_key_variable:
            request.add_unredirected_header("Authorization", f"Bearer {secret(self.rules.url_key_variable)}")
        return post(url, request, time.monotonic() + TRIES_SHARE * self.rules.timeout_s)


class SglangTeacher(ServerTeacher):
    """SGLang's `/generate` with `logprob_start_len`."""

    def scored(self, ids: list[int]) -> list[ScoredToken]:
        answer = self.ask(
            "/generate", input_ids=ids, sampling_params={"max_new_tokens": 1, "temperature": 0}, return_logprob=True,
            logprob_start_len=0, return_text_in_logprobs=True, stream=False,
        )  # fmt: skip
        return [ScoredToken(*entry) for entry in answer["meta_info"]["input_token_logprobs"]]


class VllmTeacher(ServerTeacher):
    """vLLM's `/v1/completions` with `prompt_logprobs`."""

    def scored(self, ids: list[int]) -> list[ScoredToken]:
        answer = self.ask("/v1/completions", prompt=ids, max_tokens=1, temperature=0, prompt_logprobs=0)
        found = []
        for asked, entry in zip(ids, answer["choices"][0]["prompt_logprobs"], strict=True):
            number = str(asked) if not entry or str(asked) in entry else next(iter(entry))
            told = (entry or {}).get(number, {})
            found.append(ScoredToken(told.get("logprob"), int(number), told.get("decoded_token")))
        return found


class OpenaiTeacher(ServerTeacher):
    """Completions as OpenAI's API has them, with `echo` and `logprobs`; they tell texts of tokens, not ids."""

    def scored(self, ids: list[int]) -> list[ScoredToken]:
        answer = self.ask("/v1/completions", prompt=ids, max_tokens=0, temperature=0, echo=True, logprobs=0)
        told = answer["choices"][0]["logprobs"]
        pairs = zip(told["token_logprobs"], told["tokens"], strict=True)
        return [ScoredToken(logprob, None, text) for logprob, text in pairs]
