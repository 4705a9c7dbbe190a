"""Teachers that are servers: one request for each text, answered with the log-probability of each of its ids.

An answer about other ids than those that were asked for is refused. Secrets stand in environment variables of this
process, whose names the configuration has.
"""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple
from urllib.request import Request

import msgspec
import numpy as np

from april.workers.rewards.remote import TRIES_SHARE, post, secret
from april.workers.teachers.messages import TeacherError, TeacherRules

LONGEST_ANSWER_BYTES = 1 << 30
"""Maximum size of an answer: a text of 262,144 tokens, with 20 ids of each, takes some 300 MB."""


class ScoredToken(NamedTuple):
    """A token of a text as a server scores it."""

    logprob: float | None
    """Log-probability given the tokens before it, at temperature 1; None for the first token."""
    id: int | None = None
    """Id that was scored; None if the server does not tell."""
    text: str | None = None
    """Text of the token by the server's tokeniser; None if the server does not tell."""
    top: Sequence[tuple[int, float]] = ()
    """The likeliest ids at the token's position with their log-probabilities, the likeliest first."""


class ServerTeacher:
    """Base class of the teachers that are servers. The server's address is `rules.url`."""

    is_server = True

    def __init__(self, rules: TeacherRules):
        self.rules = rules

    def scored(self, ids: list[int], with_texts: bool = False) -> list[ScoredToken]:
        """The tokens of a text as the server scores them. `with_texts`: with each token's text. Raises RemoteError, or
        LookupError if a field of the answer is missing."""
        raise NotImplementedError

    def __call__(self, ids: np.ndarray) -> np.ndarray:
        """Log-probabilities of the token ids 1 to T - 1 of a text, each given the ids before it: int32 [T] -> float64
        [T - 1]. With `top_k` = k > 0: float64 [T - 1, 1 + 2k], each followed by k pairs (id, log-probability) of the
        likeliest ids. Raises TeacherError, RemoteError."""
        scored = self.scored(ids.tolist())
        for asked, token in zip(ids.tolist(), scored, strict=False):
            if token.id not in (None, asked):
                raise TeacherError(f"the server scored another text: token {token.id} where {asked} was asked for")
        return self.told(ids.tolist(), scored)

    def told(self, ids: list[int], scored: list[ScoredToken]) -> np.ndarray:
        """Log-probabilities of the token ids 1 to T - 1 of a text, float64 [T - 1], or with `top_k` = k > 0 [T - 1, 1 +
        2k], each followed by k pairs (id, log-probability) of the likeliest ids. `ids`: the text's T token ids;
        `scored`: its tokens as the server has scored them. Raises TeacherError if the server reports another number of
        tokens, or too few likeliest ids."""
        if len(scored) != len(ids):
            raise TeacherError(f"the server scored {len(scored)} tokens where {len(ids)} were asked for")
        k = self.rules.top_k
        logprobs = np.array([np.nan if token.logprob is None else token.logprob for token in scored[1:]])
        if not k:
            return logprobs
        if told := [len(token.top) for token in scored[1:] if len(token.top) < k]:
            raise TeacherError(f"the server told the {told[0]} most likely ids of a token where {k} were asked for")
        tops = np.array([token.top[:k] for token in scored[1:]], np.float64).reshape(len(logprobs), 2 * k)
        return np.concatenate([logprobs[:, None], tops], 1)

    def ask(self, path: str, **body: Any) -> Any:
        """The server's decoded answer to a POST of `body`, as JSON, to this `path` below `rules.url`. Raises
        RemoteError."""
        url = self.rules.url.rstrip("/") + path
        body |= {"model": self.rules.model} if self.rules.model else {}
        request = Request(url, msgspec.json.encode(body), {"Content-Type": "application/json"})
        if self.rules.url_key_variable:
            request.add_unredirected_header("Authorization", f"Bearer {secret(self.rules.url_key_variable)}")
        return post(url, request, time.monotonic() + TRIES_SHARE * self.rules.timeout_s, LONGEST_ANSWER_BYTES)


class SglangTeacher(ServerTeacher):
    """A teacher on an SGLang server, asked by `/generate` with `logprob_start_len` and `top_logprobs_num`. SGLang
    scores the largest id of its vocabulary correctly, but reports it as id 0 with that id's text; this is corrected
    here."""

    def scored(self, ids: list[int], with_texts: bool = False) -> list[ScoredToken]:
        answer = self.ask(
            "/generate", input_ids=ids, sampling_params={"max_new_tokens": 1, "temperature": 0}, return_logprob=True,
            logprob_start_len=0, return_text_in_logprobs=with_texts, stream=False,
            **({"top_logprobs_num": self.rules.top_k} if self.rules.top_k else {}),
        )  # fmt: skip
        told = answer["meta_info"]
        tokens = [ScoredToken(*entry) for entry in told["input_token_logprobs"]]
        last = self.rules.vocabulary - 1
        tokens = [
            token._replace(id=last, text=None) if (asked, token.id) == (last, 0) else token
            for asked, token in zip(ids, tokens, strict=False)
        ]
        if not self.rules.top_k:
            return tokens
        return with_tops(tokens, [[(each[1], each[0]) for each in entry or ()] for entry in told["input_top_logprobs"]])


class VllmTeacher(ServerTeacher):
    """A teacher on a vLLM server, asked by `/v1/completions` with `prompt_logprobs`."""

    def scored(self, ids: list[int], with_texts: bool = False) -> list[ScoredToken]:
        k = self.rules.top_k
        answer = self.ask("/v1/completions", prompt=ids, max_tokens=1, temperature=0, prompt_logprobs=k)
        found, tops = [], []
        for asked, entry in zip(ids, answer["choices"][0]["prompt_logprobs"], strict=True):
            number = str(asked) if not entry or str(asked) in entry else next(iter(entry))
            told = (entry or {}).get(number, {})
            tops.append([(int(key), each["logprob"]) for key, each in (entry or {}).items()])
            found.append(ScoredToken(told.get("logprob"), int(number), told.get("decoded_token")))
        return with_tops(found, tops) if k else found


class OpenaiTeacher(ServerTeacher):
    """A teacher on a server with OpenAI's API, asked for completions with `echo` and `logprobs`. These report tokens as
    texts and not as ids. Several ids may have one text, so the most likely ids are requested in the form `token_id:ID`,
    which vLLM's server supports."""

    def scored(self, ids: list[int], with_texts: bool = False) -> list[ScoredToken]:
        k = self.rules.top_k
        as_ids = {"return_tokens_as_token_ids": True} if k else {}
        answer = self.ask("/v1/completions", prompt=ids, max_tokens=0, temperature=0, echo=True, logprobs=k, **as_ids)
        told = answer["choices"][0]["logprobs"]
        pairs = zip(told["token_logprobs"], told["tokens"], strict=True)
        if not k:
            return [ScoredToken(logprob, None, text) for logprob, text in pairs]
        tops = [[(id_of(key), logprob) for key, logprob in (entry or {}).items()] for entry in told["top_logprobs"]]
        return with_tops([ScoredToken(logprob, id_of(key)) for logprob, key in pairs], tops)


def with_tops(tokens: list[ScoredToken], tops: Sequence[list[tuple[int, float | None]]]) -> list[ScoredToken]:
    """The tokens, each with the likeliest ids at its position as `top`, sorted. `tops`: for each token, (id,
    log-probability) pairs as the server gave them: in any order, and perhaps with the token of the text itself. Raises
    TeacherError."""
    if len(tops) != len(tokens):
        raise TeacherError(f"the server told the most likely ids of {len(tops)} tokens where it scored {len(tokens)}")
    numbers = ([(number, np.nan if p is None else p) for number, p in top] for top in tops)
    ordered = (sorted(top, key=lambda pair: (not np.isnan(pair[1]), -pair[1])) for top in numbers)
    return [token._replace(top=top) for token, top in zip(tokens, ordered, strict=True)]


def id_of(text: str) -> int:
    """The id in a server's text `token_id:ID`. Raises TeacherError for another text."""
    number = text.removeprefix("token_id:")
    if number == text or not number.isdecimal():
        raise TeacherError(f"the server tells a token as {text[:40]!r}, where token_id:ID was asked for")
    return int(number)
