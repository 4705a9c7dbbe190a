"""One agent's session with the policy: a tree of conversations, turn by turn, as it stands in the journal.

A request goes on behind the answer that its messages repeat, and becomes an observation there; the next answer is
what the policy samples behind it. Where something else follows that answer already, or where no answer is repeated, a
new branch begins. Histories that are rendered anew, as a deployed model would read them, go on behind the last answer
up to which they have the very tokens that were said. An agent that is run again, after a crash of anything, and asks
the same again gets the answers that are there.
"""

import asyncio
from collections import Counter, defaultdict
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
CALLS = 64
"""of a session that wait for their answers at once"""
Say = Callable[[int, int, np.ndarray, wire.TurnRequest, int], None]


class Refusal(ValueError):
    """A request that cannot be answered; `code` is for programs."""

    def __init__(self, code: str, text: str, status: int = 400):
        super().__init__(text)
        self.code, self.status = code, status


@dataclass(eq=False)
class Turn:
    request: wire.TurnRequest
    branch: int
    place: int
    """among the turns of its branch"""
    start: int
    """tokens of the branch before the policy's own"""
    read: np.ndarray
    """int32 [T]: what the policy read last before it"""
    messages: list[Message] | None = None
    """that it answers; None while only the journal knows of it"""
    ids: list[int] = field(default_factory=list)
    over: bool = False
    asked: bool = False
    """this execution of the agent has asked for it"""
    calls: int = 0
    """that wait for it now"""
    delivered: bool = False
    """its answer has reached the agent"""
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """more of it is on disk, or the session is over"""

    @property
    def end(self) -> int:
        return self.start + len(self.ids)

    @property
    def is_lost(self) -> bool:
        """Whether whoever asked for it has gone away before it was answered."""
        return not self.calls and not self.delivered


@dataclass(eq=False)
class Branch:
    number: int
    parent: int
    """the branch that it has left"""
    shared: int
    """tokens that it shares with that"""
    length: int
    """tokens of both sides, shared ones included"""
    turns: list[Turn] = field(default_factory=list)


@dataclass(frozen=True)
class Wish:
    """What a request asks for."""

    messages: list[Message]
    tools: list[Any] | None = None
    max_tokens: int | None = None
    stops: tuple[int, ...] = ()
    repeated: bool = False
    """the client says that it asks once more"""
    name: str = ""
    """that the client gives to this call, and to whatever repeats it"""


class AgentSession:
    def __init__(
        self, told: wire.Session, renderer: Renderer, say: Say, max_turn_tokens: int | None, rendered: bool = False
    ):
        """`rendered`: what was said is rendered anew with each request."""
        self.told = told
        self.renderer = renderer
        self.say = say
        self.max_turn_tokens = max_turn_tokens
        self._place = self._place_rendered if rendered else self._place_stored
        self.branches = {0: Branch(0, 0, 0, 0)}
        self.turns: list[Turn] = []
        """of all branches, as they were asked for"""
        self.ended = ""
        """why nothing can be asked any more"""
        self.reward: float | None = None
        """as the agent has said over HTTP"""
        self.state = b""
        """MessagePack of what it has left over HTTP"""
        self._of_key: defaultdict[bytes, list[Turn]] = defaultdict(list)
        self._asked: Counter[bytes] = Counter()
        """how often this execution of the agent has asked the same, on purpose"""
        self._named: dict[str, Turn] = {}
        """by the name of the call"""

    # --- what is on disk --------------------------------------------------------------------------------------

    def hear(self, said: list[Said]) -> None:
        """What is new of rows that are on disk."""
        for row, payload in said:
            number = row.lease_id - self.told.lease_id
            branch = self.branches.setdefault(number, Branch(number, row.parent, row.start, row.start))
            if row.start < branch.length:
                continue
            ids = np.frombuffer(payload, "<i4", row.tokens)
            if row.kind == CHUNK:
                turn = branch.turns[-1]
                turn.ids += ids.tolist()
                turn.over = turn.over or bool(row.finish)
                turn.news.set()
            else:
                request = msgspec.msgpack.decode(payload[4 * row.tokens :], type=wire.TurnRequest)
                self._add(branch, request, row.end, ids)
            branch.length = row.end

    def _add(self, branch: Branch, request: wire.TurnRequest, start: int, read: np.ndarray) -> Turn:
        turn = Turn(request, branch.number, len(branch.turns), start, read)
        for turns in (branch.turns, self.turns, self._of_key[request.key]):
            turns.append(turn)
        return turn

    def end(self, why: str) -> None:
        """Who waits is told; nothing can be asked any more."""
        self.ended = self.ended or why
        for turn in self.turns:
            turn.news.set()

    def rewind(self) -> None:
        """The agent is run again from its beginning."""
        self._asked.clear()
        self._named.clear()
        for turn in self.turns:
            turn.asked = turn.delivered = False

    @property
    def replaying(self) -> bool:
        """Whether there are answers that only an earlier execution has asked for."""
        return not all(turn.asked for turn in self.turns)

    def superseded(self) -> list[tuple[int, int]]:
        """(branch, length) where an earlier execution has gone further than this one knows."""
        known: Counter[int] = Counter()
        for turn in self.turns:
            branch, length = self.branches[turn.branch], turn.end if turn.asked else 0
            while length > known[branch.number]:
                known[branch.number] = length
                branch, length = self.branches[branch.parent], branch.shared
        return [(number, known[number]) for number, one in self.branches.items() if known[number] < one.length]

    # --- what the agent asks ----------------------------------------------------------------------------------

    def ask(self, wish: Wish) -> Turn:
        """The turn that answers; it may be over already. Raises Refusal and BadMessages."""
        if self.ended:
            raise Refusal("session_over", f"this session is over: {self.ended}", 410)
        if sum(turn.calls for turn in self.turns) >= CALLS:
            raise Refusal("too_many_calls", f"{CALLS} calls of this session wait for answers; ask fewer at once", 429)
        key = digest(wish.messages, wish.tools, [wish.max_tokens, wish.stops])
        turn = self._again(wish, key)
        if turn is None:
            journalled = self._of_key[key][self._asked[key] :]
            turn = journalled[0] if journalled else self._open(wish, key)
            turn.messages, turn.asked = wish.messages, True
            self._asked[key] += 1
        if wish.name:
            self._named[wish.name] = turn
        return turn

    def _again(self, wish: Wish, key: bytes) -> Turn | None:
        """A turn that this execution has asked for, and whose answer the client says or seems not to have."""
        named = self._named.get(wish.name)
        if named and named.request.key == key:
            return named
        asked = self._of_key[key][: self._asked[key]]
        lost = [turn for turn in asked if turn.is_lost]
        return next(iter(lost), asked[-1] if asked and wish.repeated else None)

    def _open(self, wish: Wish, key: bytes) -> Turn:
        last, tokens = self._place(wish)
        branch, shared = (self.branches[last.branch], last.end) if last else (self.branches[0], 0)
        if shared < branch.length:
            branch = self._fork(branch, shared)
        start = shared + len(tokens)
        left = self.told.max_tokens - start
        if left < 1 or not len(tokens):
            raise Refusal(
                "context_length_exceeded",
                f"this conversation has {start} tokens, and sampling.max_response_tokens = {self.told.max_tokens} "
                "leaves no room for an answer",
            )
        wanted = wish.max_tokens or self.max_turn_tokens or left
        request = wire.TurnRequest(key, min(wanted, left), list(wish.stops))
        turn = self._add(branch, request, start, tokens)
        self.branches[branch.number], branch.length = branch, start
        self.say(self.told.lease_id + branch.number, shared, tokens, request, branch.parent)
        return turn

    def _place_stored(self, wish: Wish) -> tuple[Turn | None, np.ndarray]:
        """The turn that a request goes on behind, and what is new: its messages decide."""
        last = self._followed(wish.messages)
        if last is None:
            return None, self.renderer.begin(wish.messages, wish.tools)
        assert last.messages is not None
        new = wish.messages[len(last.messages) + 1 :]
        return last, self.renderer.go_on(last.messages, new, wish.tools, last.ids[-1])

    def _place_rendered(self, wish: Wish) -> tuple[Turn | None, np.ndarray]:
        """The same, where all of the request is rendered, and the tokens decide."""
        tokens = self.renderer.begin(wish.messages, wish.tools)
        over = [turn for turn in self.turns if turn.over and turn.end < len(tokens)]
        by_end = sorted(over, key=lambda turn: (-turn.end, turn.end < self._length_at(turn)))
        last = next((turn for turn in by_end if np.array_equal(self._said_up_to(turn), tokens[: turn.end])), None)
        return last, tokens[last.end :] if last else tokens

    def _said_up_to(self, turn: Turn) -> np.ndarray:
        """int32 [T]: tokens of both sides, from the session's beginning to the turn's end."""
        branch = self.branches[turn.branch]
        own = [piece for one in branch.turns[: turn.place + 1] for piece in (one.read, one.ids)]
        left = next((one for one in self.branches[branch.parent].turns if one.end == branch.shared), None)
        before = [self._said_up_to(left)] if left and branch.shared else []
        return np.concatenate([*before, *own])

    def _followed(self, messages: list[Message]) -> Turn | None:
        """The turn whose answer is the last that the messages repeat; of several the one that nothing follows yet."""
        over = [turn for turn in self.turns if turn.over and turn.messages is not None]
        by_length = sorted(over, key=lambda turn: (-len(turn.messages or ()), turn.end < self._length_at(turn)))
        return next((turn for turn in by_length if self._is_repeated(turn, messages)), None)

    def _length_at(self, turn: Turn) -> int:
        return self.branches[turn.branch].length

    def _is_repeated(self, turn: Turn, messages: list[Message]) -> bool:
        known = turn.messages or []
        length = len(known)
        return length + 1 < len(messages) and messages[length] == self.answer(turn) and messages[:length] == known

    def _fork(self, branch: Branch, shared: int) -> Branch:
        number = max(self.branches) + 1
        if number >= wire.BRANCHES:
            raise Refusal(
                "too_many_branches",
                f"this session has {wire.BRANCHES} branches, as many as one may have; go on where an answer ended",
            )
        return Branch(number, branch.number, shared, shared)

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
        return self.renderer.parse(self._text(turn), self.renderer.written(turn.read))

    def _text(self, turn: Turn) -> str:
        """What the policy has said so far, without what ended it."""
        ids = turn.ids[:-1] if self.ends_with_stop(turn) else turn.ids
        return self.renderer.tokenizer.decode(ids)
