"""One agent's session with the policy: a tree of conversations, as the journal has it.

A call continues after the last answer that its messages repeat: its new messages become an observation, and the policy
samples the next answer after it. If another turn already follows that answer, or no answer is repeated, a new fork
begins. With `agent.history = "template"` the whole history is rendered anew, as a deployed model would read it, and a
call continues after the last answer up to which its tokens equal the sampled ones. An agent that is run again after a
crash and makes the same calls gets the journaled answers.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import msgspec
import numpy as np

from april import wire
from april.agents.link import RowWithPayload
from april.agents.rendering import Renderer, request_key
from april.data.messages import Message, image_sources, texts_of
from april.wire.rows import CHUNK

REPLACEMENT_CHARACTER = "\ufffd"
"""Character at the end of a decoded text while some tokens of the text's last character are missing."""
MAX_PENDING_CALLS = 64
"""Most calls of one session that may wait for answers at once."""
LONG_CHARACTERS = 16_384
"""Number of characters from which a conversation is tokenised in a thread, so that the event loop is not blocked."""
SendObservation = Callable[[int, int, np.ndarray, wire.TurnRequest, int], None]
"""Type of `BrokerLink.send_observation`: (lease id of the fork, offset in the fork at which the observation begins, its
token ids, the agent's request as the journal keeps it, number of the parent fork)."""


class Refusal(ValueError):
    """A request that is answered by an HTTP error; `code` is its machine-readable reason."""

    def __init__(self, code: str, text: str, status: int = 400):
        super().__init__(text)
        self.code, self.status = code, status


@dataclass(eq=False)
class Turn:
    """An observation and the policy's answer to it."""

    request: wire.TurnRequest
    fork: int
    index: int
    """Index among the turns of its fork."""
    start: int
    """Offset of the answer in its fork (tokens), with the tokens shared with the parent fork counted."""
    observation: np.ndarray
    """int32 [T]: tokens between the previous answer, or the start of the fork, and this turn's answer."""
    messages: list[Message] | None = None
    """Messages of the call; None for a journaled turn that the current execution of the agent has not requested."""
    ids: list[int] = field(default_factory=list)
    """Sampled token ids of the answer so far."""
    complete: bool = False
    requested: bool = False
    """Whether the current execution of the agent has requested this turn."""
    pending_calls: int = 0
    """Number of HTTP calls that wait for the turn's answer now."""
    delivered: bool = False
    """Whether the complete answer was sent to the agent."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Event that is set when more of the answer is journaled, or the session ends."""

    @property
    def end(self) -> int:
        return self.start + len(self.ids)

    @property
    def is_abandoned(self) -> bool:
        """Whether all callers of the turn have hung up before its answer was sent."""
        return not self.pending_calls and not self.delivered


@dataclass(eq=False)
class Fork:
    """A conversation of the session: it shares its first `offset` tokens with the fork of number `parent`. Fork 0 is
    the root."""

    number: int
    parent: int
    offset: int
    length: int
    """Tokens of the fork's observations and answers, with those shared with the parent counted."""
    turns: list[Turn] = field(default_factory=list)


class SessionImage(NamedTuple):
    """An image in a session's requests; the broker has stored its prepared file."""

    source: str
    """Sha256, in hex, of the file that the agent has sent; message parts refer to the image by this hash."""
    name: str
    """Sha256, in hex, of the prepared PNG file that the broker keeps."""
    tokens: int
    """Number of tokens that the image takes."""
    kept_until: float
    """Time (seconds of the event loop's clock) until which the broker keeps the image even if no turn names it."""


@dataclass(frozen=True)
class PolicyCall:
    """One call of the policy, parsed from the request of any API."""

    messages: list[Message]
    tools: list[Any] | None = None
    max_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the answer, besides the tokeniser's end-of-text tokens."""
    is_retry: bool = False
    """Whether the client marks the call as a retry, in its headers."""
    idempotency_key: str = ""
    """The client's name for this call and its retries; "" without one."""
    prompt: np.ndarray | None = field(default=None, compare=False)
    """Token ids of the whole conversation, int32 [T]; None if they are not rendered yet."""


class ConversationTree:
    """All turns of a session, by fork. A call is answered by the journaled turn of an equal call, or else by a new
    turn."""

    def __init__(
        self, lease: wire.AgentSession, renderer: Renderer, send_observation: SendObservation,
        max_turn_tokens: int | None, by_tokens: bool = False,
    ):  # fmt: skip
        """`max_turn_tokens`: token limit of an answer whose call sets none; None: what the response budget leaves.
        `by_tokens`: render the whole history with each call, and continue after the last answer up to which the
        rendered tokens equal the sampled ones (`agent.history`)."""
        self.lease = lease
        self.renderer = renderer
        self.send_observation = send_observation
        self.max_turn_tokens = max_turn_tokens
        self._find_continuation = self._continue_by_tokens if by_tokens else self._continue_by_messages
        self.forks = {0: Fork(0, 0, 0, 0)}
        self.turns: list[Turn] = []
        """Turns of all forks, in the order of their first call."""
        self.end_reason = ""
        """Why the session takes no more calls; "" while it does."""
        self.reward: float | None = None
        """Reward that the agent has posted; None without one."""
        self.details: dict[str, float] = {}
        """Named numbers that the agent has posted with its reward."""
        self.state = b""
        """MessagePack of the state that the agent has posted; b"" without one."""
        self.images: dict[str, SessionImage] = {}
        """Images of the session's requests, by the sha256 of the file that the agent has sent."""
        self._turns_by_key: defaultdict[bytes, list[Turn]] = defaultdict(list)
        self._request_counts: Counter[bytes] = Counter()
        """Request key -> number of equal calls in the current execution, retries not counted."""
        self._turns_by_name: dict[str, Turn] = {}
        """Idempotency key of a call -> the turn that answers the call."""

    # --- journaled turns --------------------------------------------------------------------------------------

    def receive_rows(self, rows: list[RowWithPayload]) -> None:
        """Append `rows` that the broker has journaled (observations, and tokens of answers) to their turns. Rows that
        the tree has already are skipped."""
        for row, payload in rows:
            number = row.lease_id - self.lease.lease_id
            fork = self.forks.setdefault(number, Fork(number, row.parent, row.start, row.start))
            if row.start < fork.length:
                continue
            ids = np.frombuffer(payload, "<i4", row.tokens)
            if row.kind == CHUNK:
                turn = fork.turns[-1]
                turn.ids += ids.tolist()
                turn.complete = turn.complete or bool(row.finish)
                turn.changed.set()
            else:
                request = msgspec.msgpack.decode(payload[4 * row.tokens :], type=wire.TurnRequest)
                self._add(fork, request, row.end, ids)
            fork.length = row.end

    def _add(self, fork: Fork, request: wire.TurnRequest, start: int, observation: np.ndarray) -> Turn:
        turn = Turn(request, fork.number, len(fork.turns), start, observation)
        for turns in (fork.turns, self.turns, self._turns_by_key[request.key]):
            turns.append(turn)
        return turn

    def end(self, why: str) -> None:
        """End the session: waiting calls are woken and refused, as are later ones. `why`: the reason that the refusals
        give."""
        self.end_reason = self.end_reason or why
        for turn in self.turns:
            turn.changed.set()

    def rewind(self) -> None:
        """Begin a new execution of the agent: no turn counts as requested or delivered any more."""
        self._request_counts.clear()
        self._turns_by_name.clear()
        for turn in self.turns:
            turn.requested = turn.delivered = False

    @property
    def replaying(self) -> bool:
        """Whether journaled turns remain that the current execution of the agent has not requested."""
        return not all(turn.requested for turn in self.turns)

    @property
    def named_images(self) -> set[str]:
        """Names of the images in all turns of the session; the broker keeps them as long as the session."""
        return {name for turn in self.turns for name in turn.request.images}

    def superseded_forks(self) -> list[tuple[int, int]]:
        """(number of a fork, its length in the current execution of the agent, tokens) of each fork that an earlier
        execution has extended further. The fork's tokens from that length on are superseded."""
        known: Counter[int] = Counter()
        for turn in self.turns:
            fork, length = self.forks[turn.fork], turn.end if turn.requested else 0
            while length > known[fork.number]:
                known[fork.number] = length
                fork, length = self.forks[fork.parent], fork.offset
        return [(number, known[number]) for number, fork in self.forks.items() if known[number] < fork.length]

    # --- calls of the agent ----------------------------------------------------------------------------------

    def request_turn(self, call: PolicyCall) -> Turn:
        """The turn that answers the call; a journaled one may be complete already. Raises Refusal and BadMessages."""
        if self.end_reason:
            raise Refusal("session_over", f"this session is over: {self.end_reason}", 410)
        if sum(turn.pending_calls for turn in self.turns) >= MAX_PENDING_CALLS:
            reason = f"{MAX_PENDING_CALLS} calls of this session wait for answers; ask fewer at once"
            raise Refusal("too_many_calls", reason, 429)
        key = request_key(call.messages, call.tools, [call.max_tokens, call.stop_token_ids])
        turn = self._retried_turn(call, key)
        if turn is None:
            journaled = self._turns_by_key[key][self._request_counts[key] :]
            turn = journaled[0] if journaled else self._open_turn(call, key)
            turn.messages, turn.requested = call.messages, True
            self._request_counts[key] += 1
        if call.idempotency_key:
            self._turns_by_name[call.idempotency_key] = turn
        return turn

    async def with_prompt(self, call: PolicyCall) -> PolicyCall:
        """Render the whole prompt of a call with at least LONG_CHARACTERS of text, in a thread. This is done only if
        `request_turn` needs the whole prompt: the call repeats no answer of the session, or calls are continued by
        tokens. Returns the call with its prompt, otherwise the call unchanged. Raises BadMessages."""
        size = sum(len(text) for message in call.messages for text in texts_of(message))
        if size < LONG_CHARACTERS or not self._renders_whole(call):
            return call
        counts = self._image_tokens(call.messages)
        prompt = await asyncio.to_thread(self.renderer.render_prompt, call.messages, call.tools, counts)
        return replace(call, prompt=prompt)

    def _renders_whole(self, call: PolicyCall) -> bool:
        by_tokens = self._find_continuation == self._continue_by_tokens
        return by_tokens or self._last_repeated_turn(call.messages) is None

    def _prompt_of(self, call: PolicyCall) -> np.ndarray:
        if call.prompt is not None:
            return call.prompt
        return self.renderer.render_prompt(call.messages, call.tools, self._image_tokens(call.messages))

    def _image_tokens(self, messages: list[Message]) -> list[int]:
        return [self.images[source].tokens for source in image_sources(messages)]

    def _image_names(self, messages: list[Message]) -> list[str]:
        return [self.images[source].name for source in image_sources(messages)]

    def _retried_turn(self, call: PolicyCall, key: bytes) -> Turn | None:
        """The turn that the call retries, None if it is no retry: the turn with its idempotency key, an abandoned turn
        of an equal call, or, if the client marks a retry, the last turn of an equal call. `key`: hash of the call
        (`request_key`)."""
        named = self._turns_by_name.get(call.idempotency_key)
        if named and named.request.key == key:
            return named
        requested = self._turns_by_key[key][: self._request_counts[key]]
        abandoned = [turn for turn in requested if turn.is_abandoned]
        return next(iter(abandoned), requested[-1] if requested and call.is_retry else None)

    def _open_turn(self, call: PolicyCall, key: bytes) -> Turn:
        last, tokens = self._find_continuation(call)
        fork, offset = (self.forks[last.fork], last.end) if last else (self.forks[0], 0)
        if offset < fork.length:
            fork = self._new_fork(fork, offset)
        start = offset + len(tokens)
        remaining_tokens = self.lease.max_tokens - start
        if remaining_tokens < 1 or not len(tokens):
            raise Refusal(
                "context_length_exceeded",
                f"this conversation has {start} tokens, and sampling.max_response_tokens = {self.lease.max_tokens} "
                "leaves no room for an answer",
            )
        max_tokens = call.max_tokens or self.max_turn_tokens or remaining_tokens
        images = self._image_names(call.messages)[len(self._images_up_to(last)) if last else 0 :]
        request = wire.TurnRequest(key, min(max_tokens, remaining_tokens), list(call.stop_token_ids), images)
        turn = self._add(fork, request, start, tokens)
        self.forks[fork.number], fork.length = fork, start
        self.send_observation(self.lease.lease_id + fork.number, offset, tokens, request, fork.parent)
        return turn

    def _continue_by_messages(self, call: PolicyCall) -> tuple[Turn | None, np.ndarray]:
        """Find the turn that the call continues by comparing messages; returns it (None: a new conversation) and the
        new observation, int32 [T]."""
        last = self._last_repeated_turn(call.messages)
        if last is None:
            return None, self._prompt_of(call)
        assert last.messages is not None
        new = call.messages[len(last.messages) + 1 :]
        counts = self._image_tokens(new)
        return last, self.renderer.render_continuation(last.messages, new, call.tools, last.ids[-1], counts)

    def _continue_by_tokens(self, call: PolicyCall) -> tuple[Turn | None, np.ndarray]:
        """Find the turn that the call continues by comparing the rendered tokens; returns it (None: a new conversation)
        and the new observation, int32 [T]."""
        tokens, images = self._prompt_of(call), self._image_names(call.messages)
        complete = [turn for turn in self.turns if turn.complete and turn.end < len(tokens)]
        by_end = sorted(complete, key=lambda turn: (-turn.end, turn.end < self._fork_length(turn)))
        last = next((turn for turn in by_end if self._is_prefix(turn, tokens, images)), None)
        return last, tokens[last.end :] if last else tokens

    def _is_prefix(self, turn: Turn, tokens: np.ndarray, images: list[str]) -> bool:
        """Whether a conversation with these tokens and images starts with the conversation up to the end of `turn`."""
        shown = self._images_up_to(turn)
        return np.array_equal(self._tokens_up_to(turn), tokens[: turn.end]) and shown == images[: len(shown)]

    def _tokens_up_to(self, turn: Turn) -> np.ndarray:
        """All tokens of the conversation up to the end of the turn, int32 [T]."""
        return np.concatenate([part for each in self._turns_up_to(turn) for part in (each.observation, each.ids)])

    def _images_up_to(self, turn: Turn) -> list[str]:
        """Names of all images of the conversation up to the turn, in order."""
        return [name for each in self._turns_up_to(turn) for name in each.request.images]

    def _turns_up_to(self, turn: Turn) -> list[Turn]:
        """The turns of the conversation up to this one, in order, with those shared with the parents of its fork."""
        fork = self.forks[turn.fork]
        forked_from = next((turn for turn in self.forks[fork.parent].turns if turn.end == fork.offset), None)
        before = self._turns_up_to(forked_from) if forked_from and fork.offset else []
        return [*before, *fork.turns[: turn.index + 1]]

    def _last_repeated_turn(self, messages: list[Message]) -> Turn | None:
        """The turn whose answer is the last one that the messages repeat, None if they repeat none. If several turns
        have that answer, one that no turn follows yet is preferred."""
        complete = [turn for turn in self.turns if turn.complete and turn.messages is not None]
        by_length = sorted(complete, key=lambda turn: (-len(turn.messages or ()), turn.end < self._fork_length(turn)))
        return next((turn for turn in by_length if self._repeats_answer(turn, messages)), None)

    def _fork_length(self, turn: Turn) -> int:
        return self.forks[turn.fork].length

    def _repeats_answer(self, turn: Turn, messages: list[Message]) -> bool:
        known = turn.messages or []
        length = len(known)
        return length + 1 < len(messages) and messages[length] == self.answer(turn) and messages[:length] == known

    def _new_fork(self, fork: Fork, offset: int) -> Fork:
        number = max(self.forks) + 1
        if number >= wire.MAX_FORKS:
            raise Refusal(
                "too_many_forks",
                f"this session has {wire.MAX_FORKS} forks, as many as one may have; go on where an answer ended",
            )
        return Fork(number, fork.number, offset, offset)

    # --- answers ----------------------------------------------------------------------------------

    def ends_with_stop(self, turn: Turn) -> bool:
        """Whether the policy ended the answer by a stop token, rather than the token limit."""
        return turn.complete and turn.ids[-1] in self.renderer.tokenizer.eos_token_ids | set(
            turn.request.stop_token_ids
        )

    def text_so_far(self, turn: Turn) -> str:
        """The part of the answer's text that can be sent to the client already. If answers are parsed (into thoughts,
        tool calls and text), "" until the answer is complete, then its text."""
        if turn.complete:
            return str(self.answer(turn)["content"])
        return "" if self.renderer.parses else self._text(turn).rstrip(REPLACEMENT_CHARACTER)

    def answer(self, turn: Turn) -> Message:
        """The answer of a complete turn as the assistant message that the next call repeats."""
        return self.renderer.parse(self._text(turn), turn.observation)

    def _text(self, turn: Turn) -> str:
        """Text of the answer so far, without the stop token."""
        ids = turn.ids[:-1] if self.ends_with_stop(turn) else turn.ids
        return self.renderer.tokenizer.decode(ids)
