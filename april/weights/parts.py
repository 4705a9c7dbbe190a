"""Sending of a version in parts: each rank of the learner holds the tensors of one part, and sends them to every worker
over a link of its own.

Rank 0 keeps the weight channels (`publisher.py`) and tells the other ranks what to do. They answer nothing: what fails
there ends the link, which the worker notices and reports to rank 0.

commands = PartCommands(group)          # on rank 0
sender = PartSender(config, group, device)      # on every other rank
sender.keep(part)                       # before rank 0 publishes the version
"""

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from april.config import WeightsSection
from april.util import clock
from april.util.lifetime import PartThread
from april.weights import TRANSPORTS
from april.weights.base import PartMerger
from april.weights.channel import Adapter, ChannelInvite, TensorHead, WeightPart, link_name
from april.weights.part_transfer import DeltaBases, prepare_delta, send_part
from april.weights.snapshot import Snapshot, buckets, empty_buffer, layout, pack, snapshot_of, unpack
from april.weights.transports import Transport
from april.wire.message import Version

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

ALL = 0
"""Value of `SendPart.sender` that stands for all ranks but rank 0."""
MAX_UNREACHED = 3
"""Number of channels that workers join over rank 0's link alone, while no worker has joined one over the links of all
ranks, after which the other ranks count as unreachable. Then rank 0 sends all weights or, with `weights.senders` =
"all", the learner ends."""
OVER = "the other ranks of the learner take no more commands"
PIECE_BYTES = 16 << 20
"""Maximum number of bytes per message when one rank of the learner sends its part to another."""
END_S = 30.0
"""Longest wait of rank 0 at the end of a run until its last command has reached all other ranks, seconds."""

# --- commands ---------------------------------------------------------------------------------------------------------


class SendingCommand(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Command from rank 0 to the other ranks of the learner about the sending of weights."""


class OpenLink(SendingCommand, frozen=True):
    """Connect to the worker, or its inference server, to which the invitation `invite` was sent."""

    invite: ChannelInvite
    server_ranks: int


class HoldPart(SendingCommand, frozen=True):
    """Keep this rank's part of the newest version for a channel, until it has been sent over the channel or the channel
    ends."""

    channel: str
    version: Version
    as_delta: bool = False
    """Whether the part will be sent as a delta to weights that the worker has, instead of whole; the delta is then
    computed at once."""


class SendPart(SendingCommand, frozen=True):
    """Send the part that is kept for a channel, within `timeout_s`."""

    channel: str
    timeout_s: float
    bucket_bytes: int
    sender: int = ALL
    """Rank that sends; `ALL`: each of the other ranks does."""
    as_delta: bool = False
    """Whether the part is sent as a delta to weights that the worker has, instead of whole."""


class CloseLink(SendingCommand, frozen=True):
    """Close the link of a channel that has ended."""

    channel: str


class WithdrawPart(SendingCommand, frozen=True):
    """Begin no further transfer of the newest version, because the next version is about to be gathered in the same
    memory."""


class GivePart(SendingCommand, frozen=True):
    """Send this rank's part of the newest version to rank 0, which from now on sends all weights to the workers
    itself."""


class EndSending(SendingCommand, frozen=True):
    """No further version is published: end the thread that takes commands."""


class MergePart(SendingCommand, frozen=True):
    """Merge this rank's part of the complete weights of a version in a run that trains an adapter, and keep it as the
    newest part. Each rank receives the trained tensors of its part, and sends back the part's description."""

    version: Version
    adapter: Adapter
    trained: list[list[TensorHead]]
    """Names, dtypes and shapes of the trained tensors that each rank receives, beginning with rank 1."""


AnyCommand = OpenLink | HoldPart | SendPart | CloseLink | WithdrawPart | GivePart | MergePart | EndSending
DECODER = msgspec.msgpack.Decoder(AnyCommand)
Description: TypeAlias = tuple[WeightPart, dict[str, str]]
"""Description of a rank's part of a version: (the part's tensors and checksums, the expected checksum of each tensor in
an inference server by name)."""
DESCRIPTIONS = msgspec.msgpack.Decoder(Description | str)
"""Decoder of a rank's answer to `MergePart`: the description of its part, or the reason why it has none."""


class PartCommands:
    """Sends commands from rank 0 to all other ranks, in order, in a thread."""

    def __init__(self, group: dist.ProcessGroup, merger: PartMerger | None = None):
        """`group`: gloo group of all ranks that nothing else uses, with a timeout of days. `merger`: this rank's, in a
        run that trains an adapter; otherwise None."""
        self.group, self.merger = group, merger
        self.adapter_base = merger and merger.base.checksum
        """Checksum of the base model: to a worker that has it rank 0 sends the adapter alone. None in a run without an
        adapter."""
        self.is_reached = False
        """Whether a worker has joined a channel over the links of all ranks."""
        self.unreached = 0
        """Number of channels that a worker has joined over rank 0's link, and not over those of the other ranks."""
        self._outbox: queue.SimpleQueue[tuple[AnyCommand, Future[Any] | None, Callable[[], Any]]] = queue.SimpleQueue()
        """Commands to send, in order: (command, future of the ranks' answers, function that receives these answers).
        The future is None for a command that the ranks do not answer."""
        self._closing = threading.Lock()
        self._is_over = False
        """Whether no more commands are sent."""
        self._thread = PartThread("weights-commands", self._run)
        self._thread.start()

    @property
    def are_unreachable(self) -> bool:
        """Whether `MAX_UNREACHED` channels have been joined over rank 0's link alone, and none over the links of all
        ranks, so that no worker gets weights."""
        return self.unreached >= MAX_UNREACHED and not self.is_reached

    def tell(self, command: AnyCommand) -> None:
        self._outbox.put((command, None, lambda: None))

    def ask(self, command: AnyCommand, exchange: Callable[[], Answer]) -> Answer:
        """Send a command to all other ranks, then call `exchange` in this object's thread to receive their answers;
        returns what `exchange` returns. Raises RuntimeError if a rank is gone, or after `close`."""
        answer: Future[Answer] = Future()
        with self._closing:
            if self._is_over:
                raise RuntimeError(OVER)
            self._outbox.put((command, answer, exchange))
        return answer.result()

    def collect(self, part: Snapshot) -> Snapshot:
        """The complete newest version, joined on rank 0 from its own `part` and the parts that the other ranks keep."""
        return self.ask(GivePart(), partial(received_parts, part, self.group))

    def merge(self, snapshot: Snapshot, adapter: Adapter) -> Snapshot:
        """Have each rank merge its part of the complete weights of a version, of which `snapshot` has the trained
        tensors. Returns rank 0's part, which describes those of the other ranks. Raises RuntimeError if a rank cannot
        merge its part."""
        assert self.merger
        trained, ranks = unpack(snapshot.heads, snapshot.data), range(dist.get_world_size(self.group))
        given = [pack(snapshot.version, self.merger.trained_for(rank, trained)) for rank in ranks]
        command = MergePart(snapshot.version, adapter, [each.heads for each in given[1:]])
        own, answers = self.ask(command, partial(self._merge, command, given))
        others = list[Description]()
        for rank, answer in enumerate(answers, 1):
            if isinstance(answer, str):
                raise RuntimeError(f"rank {rank} cannot merge its part: {answer}")
            others.append(answer)
        if isinstance(own, str):
            raise RuntimeError(f"rank 0 cannot merge its part: {own}")
        checksums = dict(own.server_checksums)
        for _, their in others:
            checksums |= their
        parts = tuple(part for part, _ in others)
        return replace(own, canary=snapshot.canary, others=parts, server_checksums=checksums)

    def _merge(self, command: MergePart, given: list[Snapshot]) -> tuple[Snapshot | str, list[Description | str]]:
        """(rank 0's merged part, the other ranks' answers); an error's text in place of a part that could not be
        merged. `given`: trained tensors of the part of each rank."""
        for rank, each in enumerate(given[1:], 1):
            send_bytes(each.data, rank, self.group)
        own = merged_or_why(self.merger, 0, command, given[0].heads, given[0].data)
        answers = list[Description | str]()
        for rank in range(1, len(given)):
            size = torch.zeros(1, dtype=torch.int64)
            dist.recv(size, rank, self.group)
            answer = receive_bytes(empty_buffer(int(size)), rank, self.group)
            answers.append(DESCRIPTIONS.decode(answer.numpy().tobytes()))
        return own, answers

    def close(self, timeout_s: float = END_S) -> None:
        """Tell the other ranks that no further version is published, and wait for at most `timeout_s` until they have
        heard."""
        self.tell(EndSending())
        self._thread.join(timeout_s)

    def _run(self) -> None:
        command: AnyCommand | None = None
        answer: Future[Any] | None = None
        try:
            while not isinstance(command, EndSending):
                command, answer, exchange = self._outbox.get()
                encoded = torch.frombuffer(bytearray(msgspec.msgpack.encode(command)), dtype=torch.uint8)
                dist.broadcast(torch.tensor([len(encoded)]), 0, self.group)
                dist.broadcast(encoded, 0, self.group)
                if answer:
                    answer.set_result(exchange())
        except RuntimeError as error:  # a rank is gone, and the learner ends with it
            log.error("the other ranks cannot be told to send weights: %s", error)
            if answer and not answer.done():
                answer.set_exception(error)
        finally:
            with self._closing:
                self._is_over = True
            while not self._outbox.empty():
                _, unanswered, _ = self._outbox.get()
                if unanswered:
                    unanswered.set_exception(RuntimeError(OVER))


def received_parts(part: Snapshot, group: dist.ProcessGroup) -> Snapshot:
    """The complete version on rank 0, joined from its `part` and the parts that the other ranks send."""
    data = empty_buffer(sum(each.total_bytes for each in part.parts))
    own, *others = data.split([each.total_bytes for each in part.parts])
    own.copy_(part.data)
    for rank, place in enumerate(others, 1):
        receive_bytes(place, rank, group)
    heads = [head for each in part.parts for head in each.tensors]
    return snapshot_of(part.version, heads, data, part.canary)


def merged_or_why(
    merger: PartMerger | None, rank: int, command: MergePart, heads: list[TensorHead], data: Tensor
) -> Snapshot | str:
    """A rank's part of the complete weights, merged from the packed trained tensors `data`, uint8 [bytes], which
    `heads` describe; if that fails, the error's text. `merger`: the rank's; only ranks that have one are asked to
    merge."""
    assert merger
    try:
        return merger.merged(rank, command.version, command.adapter, unpack(heads, data))
    except Exception as error:  # rank 0 waits for what becomes of each part
        log.exception("the part of %s cannot be merged", command.version)
        return str(error)


def send_bytes(data: Tensor, rank: int, group: dist.ProcessGroup) -> None:
    """Send uint8 [bytes] to a rank."""
    for piece in buckets(data, PIECE_BYTES) if len(data) else ():
        dist.send(piece, rank, group)


def receive_bytes(data: Tensor, rank: int, group: dist.ProcessGroup) -> Tensor:
    """Receive uint8 [bytes] from a rank, in place."""
    for piece in buckets(data, PIECE_BYTES) if len(data) else ():
        dist.recv(piece, rank, group)
    return data


# --- the sender of a part ---------------------------------------------------------------------------------------------


@dataclass(eq=False)
class SendingLink:
    """The state of a rank's link to one worker."""

    invite: ChannelInvite
    server_ranks: int
    held: Snapshot | None = None
    """Part that a `HoldPart` command has this rank keep until a `SendPart` command sends it; None without one."""
    due: queue.SimpleQueue[tuple[Snapshot, SendPart | None, float] | None] = field(default_factory=queue.SimpleQueue)
    """Work of the link's thread, in order: (part, command to send it, deadline as Unix time in seconds). If the command
    is None, only the delta of the part is computed, to be sent on a later command. None in place of all three: the
    channel has ended."""


class PartSender:
    """Sends this rank's parts to the workers, with a thread for each worker, on rank 0's commands."""

    def __init__(
        self,
        config: WeightsSection,
        group: dist.ProcessGroup,
        device: torch.device,
        merger: PartMerger | None = None,
    ):
        """`group`, `merger`: as in `PartCommands`. `device`: the rank's, through whose memory nccl sends."""
        self.merger, self.config, self.group, self.rank, self.device = merger, config, group, dist.get_rank(), device
        self._transport: Transport = TRANSPORTS.find(config.transport)(config)
        self._changed = threading.Condition()
        self._newest: Snapshot | None = None
        self._bases = DeltaBases(config.delta)
        self._links: dict[str, SendingLink] = {}
        self._gathers = self._withdrawals = 0
        """`_gathers`: number of versions that this rank has begun to gather. `_withdrawals`: number of versions that
        rank 0 has withdrawn (`WithdrawPart`)."""
        self._thread = PartThread("weights-part", self._run)
        self._thread.start()

    def keep(self, part: Snapshot) -> None:
        """Make `part` this rank's newest part, to be sent once rank 0 has published the version."""
        with self._changed:
            self._newest = self._bases.followed_by(part)

    def await_withdrawn(self, timeout_s: float) -> None:
        """Wait until rank 0 has withdrawn the newest version, before the next is gathered. The version's memory is then
        free, unless a transfer of it to a worker still runs. Raises RuntimeError after `timeout_s`."""
        with self._changed:
            self._gathers += 1
            if not self._changed.wait_for(lambda: self._withdrawals >= self._gathers, timeout_s):
                raise RuntimeError(f"rank 0 has not withdrawn the last weights within {timeout_s:g} s")

    def close(self) -> None:
        """Wait for the end of this rank's thread: rank 0 ends it by a command, once the workers have the last
        version."""
        self._thread.join(self.config.transfer_deadline_s + END_S)

    def _run(self) -> None:
        command: AnyCommand | None = None
        try:
            while not isinstance(command, EndSending):
                size = torch.zeros(1, dtype=torch.int64)
                dist.broadcast(size, 0, self.group)
                encoded = torch.empty(int(size), dtype=torch.uint8)
                dist.broadcast(encoded, 0, self.group)
                command = DECODER.decode(encoded.numpy().tobytes())
                self._obey(command)
        except RuntimeError as error:  # rank 0 is gone, and the learner ends with it
            log.error("rank 0 does not say any more which weights to send: %s", error)
        with self._changed:
            for link in self._links.values():
                link.due.put(None)

    def _obey(self, command: AnyCommand) -> None:
        with self._changed:
            if isinstance(command, OpenLink):
                link = SendingLink(command.invite, command.server_ranks)
                self._links[command.invite.channel] = link
                PartThread(f"{command.invite.channel} {self.rank}", self._run_link, link).start()
            elif isinstance(command, WithdrawPart):
                self._newest = None
                self._bases.release()
                self._withdrawals += 1
                self._changed.notify_all()
            elif isinstance(command, GivePart) and self._newest:
                self._bases = DeltaBases("off")  # rank 0 makes the deltas
                send_bytes(self._newest.data, 0, self.group)
            elif isinstance(command, MergePart):
                self._merge(command)
            elif isinstance(command, HoldPart | SendPart | CloseLink) and (known := self._links.get(command.channel)):
                self._direct(known, command)

    def _merge(self, command: MergePart) -> None:
        """Receive trained tensors from rank 0, merge this rank's part with them, and send rank 0 the part's
        description, or the error."""
        self._newest, heads = None, command.trained[self.rank - 1]
        data = receive_bytes(empty_buffer(layout(heads)[1]), 0, self.group)
        made = merged_or_why(self.merger, self.rank, command, heads, data)
        if isinstance(made, Snapshot):
            self._newest = made
        said = made if isinstance(made, str) else (made.hashed_part, dict(made.server_checksums))
        encoded = torch.frombuffer(bytearray(msgspec.msgpack.encode(said)), dtype=torch.uint8)
        dist.send(torch.tensor([len(encoded)]), 0, self.group)
        send_bytes(encoded, 0, self.group)

    def _direct(self, link: SendingLink, command: HoldPart | SendPart | CloseLink) -> None:
        """Carry out, or pass to the thread of the link, a command that concerns the link to one worker."""
        if isinstance(command, HoldPart) and self._newest and self._newest.version == command.version:
            link.held = self._newest
            if command.as_delta:
                link.due.put((link.held, None, 0.0))
        elif isinstance(command, SendPart) and command.sender not in (ALL, self.rank):
            pass  # another rank's turn
        elif isinstance(command, SendPart) and link.held:
            link.due.put((link.held, command, clock.now() + command.timeout_s))
            link.held = None
        else:
            if not isinstance(command, CloseLink):
                log.error("%s: this rank has no such part for %s", command, link.invite.channel)
            link.held = None
            link.due.put(None)

    def _run_link(self, link: SendingLink) -> None:
        name = link.invite.channel
        own = msgspec.structs.replace(link.invite, channel=link_name(name, self.rank))
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # a thread begins with the first accelerator
        try:
            meeting = self._transport.meet(own, as_learner=True, server_ranks=link.server_ranks)
            with contextlib.closing(meeting) as connected:
                while task := link.due.get():
                    part, command, deadline = task
                    if command is None:
                        prepare_delta(part)
                    else:
                        to_server, size = bool(link.server_ranks), command.bucket_bytes
                        send_part(connected, part, size, deadline, to_server=to_server, as_delta=command.as_delta)
                    del task, part
        except Exception as error:  # whatever a transport raises costs its channel alone
            fault = not isinstance(error, RuntimeError | OSError)
            log.info("rank %d's link of channel %s is lost: %s", self.rank, name, error, exc_info=fault)
        finally:
            with self._changed:
                if self._links.get(name) is link:
                    del self._links[name]
