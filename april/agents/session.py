"""One agent's conversation with the policy, turn by turn, as it stands in the journal.

A request goes on where the last answer ended, and becomes an observation; the answer is what the policy samples behind
it. An agent that is run again, after a crash of anything, asks the same again and gets the answers that are there.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from april import wire
from april.agents.link import Said
from april.agents.rendering import Message, Renderer, digest
from april.wire.rows import CHUNK

UNFINISHED_TEXT = "\ufffd"
"""the end of a text whose last character has not come whole"""
Say = Callable[[int, int, np.ndarray, wire.TurnRequest], None]


class Refusal(ValueError):
    """A request that cannot be answered; `code` is for programs."""

    def __init__(self, code: str, text: str, status: int = 400):
        super().__init__(text)
        self.code, self.status = code, status


@dataclass(eq=False)
class Turn:
    request: wire.TurnRequest
    start: int
    """tokens of the session before the policy's own"""
    opening: str = ""
    """what the policy read last before it, special tokens included: templates begin its message there"""
    messages: list[Message] | None = None
    """that it answers; None while only the journal knows of it"""
    ids: list[int] = field(default_factory=list)
    over: bool = False
    delivered: bool = False
    """its answer has reached the agent"""
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """more of it is on disk, or the session is over"""


@dataclass(frozen=True)
class Wish:
    """What a request asks for."""

    messages: list[Message]
    tools: list[Any] | None = None
    max_tokens: int | None = None
    stops: tuple[int, ...] = ()
    repeated: bool = False
    """the client says that it asks once more"""


class AgentSession:
    def __init__(self, told: wire.Session, renderer: Renderer, say: Say, max_turn_tokens: int | None):
        self.told = told
        self.renderer = renderer
        self.say = say
        self.max_turn_tokens = max_turn_tokens
        self.turns: list[Turn] = []
        self.length = 0
        """tokens of both sides"""
        self.asked = 0
        """turns that this execution of the agent has asked for; what lies behind them is to be replayed"""
        self.ended = ""
        """why nothing can be asked any more"""
        self.reward: float | None = None
        """as the agent has said over HTTP"""

    # --- what is on disk --------------------------------------------------------------------------------------

    def hear(self, said: list[Said]) -> None:
        """What is new of rows that are on disk."""
        for row, payload in said:
            if row.start < self.length:
                continue
            ids = np.frombuffer(payload, "<i4", row.tokens).tolist()
            if row.kind == CHUNK:
                turn = self.turns[-1]
                turn.ids += ids
                turn.over = turn.over or bool(row.finish)
                turn.news.set()
            else:
                request = msgspec.msgpack.decode(payload[4 * row.tokens :], type=wire.TurnRequest)
                self.turns.append(Turn(request, row.end, self.renderer.written(ids)))
            self.length = row.end

    def end(self, why: str) -> None:
        """Who waits is told; nothing can be asked any more."""
        self.ended = self.ended or why
        for turn in self.turns:
            turn.news.set()

    def rewind(self) -> None:
        """The agent is run again from its beginning."""
        self.asked = 0

    @property
    def replaying(self) -> bool:
        """Whether the next request has its answer already."""
        return self.asked < len(self.turns)

    # --- what the agent asks ----------------------------------------------------------------------------------

    def ask(self, wish: Wish) -> Turn:
        """The turn that answers; it may be over already. Raises Refusal and BadMessages."""
        if self.ended:
            raise Refusal("session_over", f"this session is over: {self.ended}", 410)
        key = digest(wish.messages, wish.tools, [wish.max_tokens, wish.stops])
        if self.replaying:
            return self._replay(wish, key)
        if turn := self._again(wish, key):
            return turn
        return self._open(wish, key)

    def _replay(self, wish: Wish, key: bytes) -> Turn:
        turn = self.turns[self.asked]
        if turn.request.key != key:
            raise Refusal("replay_differs", "before a restart this session asked something else at this point", 409)
        self.asked += 1
        turn.messages, turn.delivered = wish.messages, False
        return turn

    def _again(self, wish: Wish, key: bytes) -> Turn | None:
        """A turn that was asked for before, and whose answer the client says or seems not to have."""
        if not self.turns or self.turns[-1].request.key != key:
            return None
        turn = self.turns[-1]
        return turn if wish.repeated or not turn.delivered else None

    def _open(self, wish: Wish, key: bytes) -> Turn:
        tokens = self._render(wish)
        start = self.length + len(tokens)
        left = self.told.max_tokens - start
        if left < 1 or not len(tokens):
            raise Refusal(
                "context_length_exceeded",
                f"this conversation has {start} tokens, and sampling.max_response_tokens = {self.told.max_tokens} "
                "leaves no room for an answer",
            )
        wanted = wish.max_tokens or self.max_turn_tokens or left
        request = wire.TurnRequest(key, min(wanted, left), list(wish.stops))
        turn = Turn(request, start, self.renderer.written(tokens), wish.messages)
        self.say(self.told.lease_id, self.length, tokens, turn.request)
        self.turns.append(turn)
        self.length, self.asked = start, self.asked + 1
        return turn

    def _render(self, wish: Wish) -> np.ndarray:
        if not self.turns:
            return self.renderer.begin(wish.messages, wish.tools)
        last = self.turns[-1]
        if not last.over or last.messages is None:
            raise Refusal("turn_under_way", "this session waits for an answer; ask one after the other", 409)
        known = [*last.messages, self.answer(last)]
        if wish.messages[: len(known)] != known or len(wish.messages) == len(known):
            raise Refusal(
                "history_rewritten",
                "a request has to go on where the last answer ended: its messages are those of the last request, that "
                "answer, and at least one more",
            )
        return self.renderer.go_on(last.messages, wish.messages[len(known) :], wish.tools, last.ids[-1])

    # --- what it is answered ----------------------------------------------------------------------------------

    def ends_with_stop(self, turn: Turn) -> bool:
        """Whether the policy has ended the turn, rather than its bound."""
        return turn.over and turn.ids[-1] in self.renderer.tokenizer.eos_token_ids | set(turn.request.stops)

    def text_so_far(self, turn: Turn) -> str:
        """What can be told of the answer's text; where answers are parsed, nothing before they are whole."""
        if turn.over:
            return str(self.answer(turn)["content"])
        return "" if self.renderer.parses else self._text(turn).rstrip(UNFINISHED_TEXT)

    def answer(self, turn: Turn) -> Message:
        """Of a turn that is over, as a message of the next request."""
        return self.renderer.parse(self._text(turn), turn.opening)

    def _text(self, turn: Turn) -> str:
        """What the policy has said so far, without what ended it."""
        ids = turn.ids[:-1] if self.ends_with_stop(turn) else turn.ids
        return self.renderer.tokenizer.decode(ids)
