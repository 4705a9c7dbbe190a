"""Prompts that a trainer brings, as the broker takes them: token ids, a reference answer, and what is to come back."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
import numpy as np

from april import wire
from april.config import Config
from april.data.tokenizer import Tokenizer
from april.wire.limits import FROM_PEER

BODY_BYTES = FROM_PEER.body_bytes // 2
"""of labels and extras in a message, so that there is room for the rest of its body"""
MESSAGE_TOKENS = FROM_PEER.frame_bytes // 4
HEAD_BYTES = 160
"""of a prompt in a message, beside label and extra"""


PromptText: TypeAlias = str | list[dict] | Sequence[int]


class PromptsWanted(RuntimeError):
    """All prompts that were submitted have become groups, and too few of these are complete for a batch."""


@dataclass(frozen=True)
class Prompt:
    """What `submit` takes for each group."""

    prompt: PromptText
    """text, chat messages, or token ids"""
    label: str = ""
    """reference answer"""
    reward: str = ""
    """name of its verifier, "" for the run's"""
    extra: Any = None
    """anything that MessagePack holds; it comes back with the group, after a crash, too"""


Piece: TypeAlias = tuple[wire.Submission, np.ndarray]


def encoder(config: Config) -> Callable[[Prompt], Piece]:
    """What makes a prompt ready to be sent; it raises ValueError, BadRow among them, with what is wrong with one."""
    tokenizer: list[Tokenizer] = []
    longest = config.longest_prompt_tokens

    def encode(one: Prompt) -> Piece:
        if isinstance(one.prompt, str) or (len(one.prompt) and isinstance(one.prompt[0], dict)):
            if not tokenizer:
                tokenizer.append(Tokenizer(config.model.path))
            ids = tokenizer[0].encode_prompt(one.prompt, config.data.template_options)  # type: ignore[arg-type]
        else:
            ids = np.asarray(one.prompt, np.int32)
        if not 1 <= len(ids) <= longest:
            raise ValueError(f"a prompt has {len(ids)} tokens; between 1 and {longest} fit, data.max_prompt_tokens")
        extra = b"" if one.extra is None else msgspec.msgpack.encode(one.extra, enc_hook=plain)
        submission = wire.Submission(len(ids), one.label, one.reward, extra)
        if body_bytes(submission) > BODY_BYTES:
            raise ValueError(f"label and extra of a prompt have more than {BODY_BYTES} bytes together; shorten them")
        return submission, ids

    return encode


def decoded(extra: bytes) -> Any:
    return msgspec.msgpack.decode(extra) if extra else None


def plain(value: Any) -> Any:
    """Numbers and arrays of NumPy as Python's own."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise NotImplementedError(f"extra of a prompt holds a {type(value).__name__}, which MessagePack does not")


def body_bytes(prompt: wire.Submission) -> int:
    return HEAD_BYTES + 4 * len(prompt.label) + len(prompt.extra)


def messages(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """As many at a time as a message holds."""
    some: list[Piece] = []
    size = tokens = 0
    for piece in pieces:
        submission, ids = piece
        if some and (size + body_bytes(submission) > BODY_BYTES or tokens + len(ids) > MESSAGE_TOKENS):
            yield some
            some, size, tokens = [], 0, 0
        some.append(piece)
        size, tokens = size + body_bytes(submission), tokens + len(ids)
    if some:
        yield some
