"""Publication of the trainer's weights: gathered on the ranks, and sent in threads while training goes on."""

import logging
import time
from dataclasses import replace

import torch
import torch.distributed as dist

from april.config import Config, ConfigError, is_loopback
from april.config.section import AUTO
from april.learner.prefetch import Weights, WeightSender
from april.learner.process_group import all_gather_values, is_on_one_machine, long_wait_group
from april.learner.snapshot_writing import SnapshotWriting
from april.learner.trainer import Trainer
from april.learner.weight_parts import divide, gather_part
from april.util.errors import refuse
from april.util.pulse import MAIN
from april.weights import TRANSPORTS
from april.weights.base import BaseWeights, PartMerger
from april.weights.channel import TensorHead, connect_to_store
from april.weights.parts import Description, PartCommands, PartSender
from april.weights.publisher import WeightPublisher
from april.weights.snapshot import ReusedBuffers, checksums_in_server, unpack
from april.wire.message import Version
from april.wire.sockets.base import own_address

log = logging.getLogger(__name__)


class DividedSending:
    """The ranks of a learner that each gather and send a part of the weights."""

    def __init__(
        self,
        config: Config,
        publisher: WeightPublisher | None,
        device: torch.device,
        adapter_base: BaseWeights | None = None,
    ):
        """`publisher` is None except on rank 0; `device` is this rank's. `adapter_base`: if given, rank 0 sends an
        adapter of this model, and all ranks a part of the complete weights to workers that do not have it. Raises
        ConfigError if workers cannot reach every rank. Collective."""
        self.config, self.publisher = config, publisher
        self.buffers = ReusedBuffers(stay=True)
        self.needs_checksums = config.engine.weights == "broadcast" and device.type == "cpu"
        """Whether the ranks compute checksums of their tensors, by which the weights of inference servers can be
        verified."""
        names = divided_names(adapter_base) if adapter_base else []
        self.merger = PartMerger(adapter_base, names, self.needs_checksums) if adapter_base else None
        self._check_addresses()
        group = long_wait_group()
        self.ends: PartCommands | PartSender
        """On rank 0, what commands the other ranks to send their parts; on each other rank, what carries out these
        commands."""
        if publisher:
            self.ends = PartCommands(group, self.merger)
            publisher.share(self.ends, dist.get_world_size())
        else:
            self.ends = PartSender(config.weights, group, device, self.merger)
        self._is_alone = self._has_gathered = False
        """`_is_alone`: whether rank 0 has taken over the sending of all weights. `_has_gathered`: whether a version has
        been gathered. Meaningful on rank 0 only."""

    @classmethod
    def start(cls, trainer: Trainer, publisher: WeightPublisher | None) -> "DividedSending | None":
        """Set up sending in parts; `publisher` is None except on rank 0. Returns None if rank 0 gathers and sends all
        weights: with `weights.senders` = "rank_0", one rank, a model whose files have its weights in another form, or
        workers that not every rank reaches; with "auto" also where inference servers receive. Collective."""
        config = trainer.config
        transport, senders = TRANSPORTS.find(config.weights.transport), config.weights.senders
        if senders == "rank_0" or dist.get_world_size() == 1:
            return None
        reaches = transport.carries_weights and (is_on_one_machine() or not transport.is_local)
        is_untried = senders == AUTO and config.engine.weights == "broadcast"
        base = trainer.backend.adapter_base
        if not reaches or is_untried or (base is None and trainer.backend.divisible_weights() is None):
            if publisher:
                log.info("rank 0 gathers and sends all weights")
            return None
        try:
            divided = cls(config, publisher, trainer.device, base)
        except ConfigError as error:
            if senders != AUTO:
                raise
            if publisher:
                log.warning("rank 0 gathers and sends all weights, since %s", error)
            return None
        if publisher:
            done = "gathers and sends a part of the weights"
            if base:
                done = (
                    "merges and sends a part of the weights to workers without the base model; others get the adapter"
                )
            log.info("each of %d ranks %s", dist.get_world_size(), done)
        return divided

    def _check_addresses(self) -> None:
        """Raises ConfigError on every rank if, of several machines, one would listen for workers at an address that
        only the machine itself reaches, or cannot reach rank 0's store, from which workers learn the addresses.
        Collective."""
        if is_on_one_machine():
            return
        place = self.publisher.store if self.publisher else ("", 0)
        host, port = all_gather_values(place, tuple[str, int])[0]
        problem = problem_on_route(host, port, self.config.weights.join_deadline_s)
        for rank, its in enumerate(all_gather_values(problem, str)):
            if its:
                refuse(
                    "weights.senders",
                    self.config.weights.senders,
                    f"wants every rank of the learner to be reached by workers, and rank {rank} {its}",
                    "set weights.host to an address of rank 0 that other machines reach, or weights.senders = 'rank_0'",
                )

    def check(self) -> None:
        """If workers have reached rank 0 and none has reached all ranks, have rank 0 send all weights from now on; with
        `weights.senders` = "all" raise ConfigError instead."""
        if not self.publisher or not isinstance(self.ends, PartCommands) or not self.ends.are_unreachable:
            return
        newest = self.publisher.newest
        if self._is_alone or (self._has_gathered and newest is None):  # which a thread is about to publish
            return
        times, fix = (
            self.ends.unreached,
            "have every machine of the learner listen where workers reach it (weights.host)",
        )
        why = f"has not worked: {times} times a worker reached rank 0 of the learner, and not all others"
        try:
            refuse("weights.senders", self.config.weights.senders, why, f"{fix}, or set 'rank_0'")
        except ConfigError as error:
            if self.config.weights.senders != AUTO:
                raise
            log.warning("rank 0 sends all weights from now on, since %s", error)
        self._is_alone = True
        self.publisher.send_alone(self.ends.collect(newest) if newest and not newest.adapter else newest)

    def gather(self, trainer: Trainer, version: Version) -> Weights:
        """Gather this rank's part of the current weights, which replaces its part of the last version, and keep it to
        be sent. Returns the part; on rank 0 with the descriptions of the other ranks' parts. An adapter is gathered on
        rank 0 alone, and merged when a worker needs the complete weights. Collective."""
        if self.merger:
            return trainer.weights_to_publish()
        if self.publisher:
            self.publisher.withdraw()
        elif isinstance(self.ends, PartSender):
            self.ends.await_withdrawn(self.config.learner.collective_timeout_s)
        tensors = trainer.backend.divisible_weights()
        assert tensors is not None
        part = gather_part(version, tensors, trainer.generation_dtype, self.buffers.take)
        if isinstance(self.ends, PartSender):
            self.ends.keep(part)
        checksums = checksums_in_server(unpack(part.heads, part.data)) if self.needs_checksums else {}
        told = part.hashed_part if isinstance(self.ends, PartSender) else part.part
        (_, own), *others = all_gather_values((told, checksums), Description)
        merged = own | {name: each for _, their in others for name, each in their.items()}
        part = replace(part, others=tuple(other for other, _ in others), server_checksums=merged)
        self._has_gathered = True
        return self.ends.collect(part) if self._is_alone and isinstance(self.ends, PartCommands) else part

    def close(self) -> None:
        """Wait until the workers have the last version, then end the threads."""
        if self.publisher:
            self.publisher.drain()
        self.ends.close()


def divided_names(base: BaseWeights) -> list[list[str]]:
    """By rank, the names of the base model's tensors that the rank merges with the adapter for its part of the
    weights."""
    heads = [TensorHead(name, "float32", list(tensor.shape)) for name, tensor in base.tensors.items()]
    names: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    for head, owner in zip(heads, divide(heads, len(names)), strict=True):
        names[owner].append(head.name)
    return names


def problem_on_route(host: str, port: int, timeout_s: float) -> str:
    """The reason why a rank on this machine cannot send weights to other machines, "" if there is none. `host`, `port`:
    rank 0's rendezvous store."""
    own = own_address(host, port)
    if is_loopback(own):
        return f"would listen at {own}, which only its own machine reaches"
    try:
        connect_to_store(host, port, timeout_s)
    except (RuntimeError, OSError) as error:
        return f"does not reach rank 0 at {host}:{port} ({str(error).splitlines()[0]})"
    return ""


class WeightPublication:
    """Publishes the trainer's weights: gathers them on rank 0, or a part of them on each rank, and sends or writes them
    in threads while training goes on."""

    def __init__(
        self,
        trainer: Trainer,
        sender: WeightSender,
        divided: DividedSending | None = None,
        snapshots: SnapshotWriting | None = None,
    ):
        self.trainer, self.sender, self.divided, self.snapshots = trainer, sender, divided, snapshots

    def publish(self) -> dict[str, float]:
        """Gather the current weights and start sending or writing them, unless their step is below the frontier (a
        replayed batch), or no snapshot is due; returns the seconds of each part of the work and, if weights are
        published in 16 bits, `canary_rounding`: what rounding does to log-probabilities at the sampling temperature,
        nats. Collective."""
        step = self.trainer.step_count
        if not self.sender.is_due(step) or (self.snapshots and not self.snapshots.is_due(step)):
            return {}
        began = time.perf_counter()
        MAIN.at("gathering weights")
        canary = self.trainer.canary() if self.trainer.config.weights.canary else None
        scored = time.perf_counter()
        version = Version(self.sender.incarnation, step)
        weights: Weights
        if self.snapshots:
            self.snapshots.start_writing(self.snapshots.gather(self.trainer, version), canary)
        else:
            weights = self.divided.gather(self.trainer, version) if self.divided else self.trainer.weights_to_publish()
            self.sender.start(step, weights, canary)
        figures = {"canary_s": scored - began, "gather_s": time.perf_counter() - scored}
        if canary and canary.dtype != "float32":
            figures["canary_rounding"] = canary.rounding / (self.trainer.config.sampling.temperature or 1.0)
        return figures

    def finish(self) -> dict[str, float]:
        """Wait until the weights are sent or written; returns metrics of the publication."""
        MAIN.at("sending weights", takes_long=True)
        return self.snapshots.finish() if self.snapshots else self.sender.finish()
