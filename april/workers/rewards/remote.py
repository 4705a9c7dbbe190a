"""The verifier `remote`, a reward model over HTTP: one request per batch of responses, retried only if that can help.

POST reward.url   [{"prompt": ..., "response": ..., "label": ..., "finish_reason": ..., "tokens": ...}, ...]
answer            [0.7, {"score": 0.2, "toxicity": 0.1}, {"error": "too long"}, ...]     in the same order

An object may have a text `feedback`.

Secrets stand in environment variables of this process, whose names the configuration has. No error text has them.
"""

import http.client
import math
import os
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from numbers import Real

import msgspec

from april.workers.rewards.messages import Item, RewardRules, Score, feedback_in, takes_items

TRIES = 4
FIRST_PAUSE_S = 0.2
"""Pause before the second try (s); it doubles before each further one."""
RETRIABLE_STATUSES = {408, 425, 429, 500, 502, 503, 504}
"""HTTP statuses after which a server may answer later; any other refusal would only be repeated."""
LONGEST_ANSWER_BYTES = 16 << 20
VARIABLE = re.compile(r"\$\{(\w+)\}")
"""Regular expression for the name of an environment variable in `reward.url`, such as ${SCORER_KEY}."""
TRIES_SHARE = 0.8
"""Share of `reward.timeout_s` within which requests are tried, so that they end before the pool ends this process."""


@takes_items
def remote(items: list[Item], rules: RewardRules) -> list[Score]:
    """Scores of a batch, in order. Raises RemoteError if the reward model gives none."""
    body = msgspec.json.encode([
        {
            "prompt": item.prompt, "response": item.response, "label": item.label,
            "finish_reason": item.finish_reason, "tokens": item.tokens,
        }
        for item in items
    ])  # fmt: skip
    answer = post(rules.url, request_of(rules, body), time.monotonic() + TRIES_SHARE * rules.timeout_s)
    if not isinstance(answer, list) or len(answer) != len(items):
        raise RemoteError(f"{rules.url} did not answer with a list of {len(items)} scores")
    return [score_of(item, value) for item, value in zip(items, answer, strict=True)]


vars(remote).update(in_batches=True, asks_a_server=True, wrong=None)


class RemoteError(RuntimeError):
    """The reward model gave no scores; the text says why."""


def request_of(rules: RewardRules, body: bytes) -> urllib.request.Request:
    """The request to the reward model, with its secrets. Raises RemoteError."""
    url = VARIABLE.sub(lambda found: urllib.parse.quote(secret(found[1]), safe=""), rules.url)
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    if rules.url_key_variable:
        request.add_unredirected_header("Authorization", f"Bearer {secret(rules.url_key_variable)}")
    return request


def secret(name: str) -> str:
    """The value of the environment variable `name`. Raises RemoteError if it is not set, or is not one word of visible
    ASCII characters."""
    value = os.environ.get(name, "").strip()
    if not re.fullmatch("[!-~]+", value):
        raise RemoteError(f"the environment variable {name} of the reward model is not set, or is no ASCII word")
    return value


def post(url: str, request: urllib.request.Request, deadline_s: float, longest_bytes: int = LONGEST_ANSWER_BYTES):
    """Send the request and return the decoded answer. Lost connections and RETRIABLE_STATUSES are retried, at most
    TRIES times in all and until `deadline_s` (monotonic clock). `url`: the address without secrets, for errors. Raises
    RemoteError, also for an answer of more than `longest_bytes`."""
    pause_s = FIRST_PAUSE_S
    for number in range(1, TRIES + 1):
        try:
            return answer_to(url, request, max(0.05, deadline_s - time.monotonic()), longest_bytes)
        except urllib.error.HTTPError as error:
            if error.code not in RETRIABLE_STATUSES:
                raise RemoteError(f"{url} refuses with status {error.code}") from None
            reason = f"status {error.code}"
        except (OSError, http.client.HTTPException) as error:
            reason = f"{type(error).__name__}: {error}"
        if number == TRIES or time.monotonic() + pause_s >= deadline_s:
            raise RemoteError(f"{url} gave no answer in {number} tries, the last: {reason}")
        time.sleep(pause_s)
        pause_s *= 2


def answer_to(url: str, request: urllib.request.Request, timeout_s: float, longest_bytes: int):
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        data = answer.read(longest_bytes + 1)
    if len(data) > longest_bytes:
        raise RemoteError(f"{url} answered with more than {longest_bytes} bytes")
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RemoteError(f"{url} did not answer with JSON ({error})") from None


def score_of(item: Item, answer) -> Score:
    """The score of an item from the server's answer about it: a number, an object with `score` and further numbers as
    details, or an object with `error`."""
    if isinstance(answer, dict) and answer.get("error"):
        return Score(item.key, None, f"the reward model says: {str(answer['error'])[:200]}")
    fields = answer if isinstance(answer, dict) else {"score": answer}
    numbers = {str(key): float(value) for key, value in fields.items() if is_number(value)}
    if "score" not in numbers:
        return Score(item.key, None, f"the reward model gave {str(answer)[:80]!r}, which has no finite score")
    return Score(item.key, numbers.pop("score"), None, numbers, feedback=feedback_in(fields))


def is_number(value) -> bool:
    return isinstance(value, Real) and math.isfinite(value)
