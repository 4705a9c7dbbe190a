"""Complete weights of a version in a run that trains an adapter, for workers that do not have its base model. Learner
rank 0 merges them, or each rank that sends merges a part."""

import logging
import threading

from april.weights.base import BaseWeights
from april.weights.channel import WeightChannel
from april.weights.parts import HoldPart, PartCommands
from april.weights.snapshot import Snapshot, unpack

log = logging.getLogger(__name__)


class MergedSnapshots:
    """The complete weights of the latest version, merged once for all channels that need them."""

    base: BaseWeights | None = None
    """The base model that the run's adapter is merged into; None in a run without an adapter."""

    def __init__(self) -> None:
        self._making = threading.Lock()
        self._latest: Snapshot | None = None
        self._senders = 0
        """Number of ranks that have divided the merging of `_latest` among them; 1: rank 0 has merged all."""

    def form_for(
        self, channel: WeightChannel, snapshot: Snapshot, others: PartCommands | None, sends: bool = True
    ) -> Snapshot:
        """The snapshot in the form that the channel's worker accepts: the adapter as it is, or complete weights.

        `others`: commands to the other ranks that send: each then merges a part of the complete weights, and rank 0's
        part is returned. None: rank 0 merges all. `sends`: whether the learner itself sends this version over the
        channel, for which the other ranks are told to keep their parts; otherwise another worker forwards it.
        """
        if snapshot.adapter is None or self.base is None or channel.base == snapshot.adapter.base:
            return snapshot
        if not channel.transfers:
            log.info("%s does not take adapters of this model, and is sent all weights", channel.worker)
        with self._making:
            wanted = (snapshot.version, channel.senders)
            if self._latest is None or (self._latest.version, self._senders) != wanted:
                self._latest = None  # before memory for the next one is taken
                if others:
                    self._latest = others.merge(snapshot, snapshot.adapter)
                else:
                    trained = unpack(snapshot.heads, snapshot.data)
                    self._latest = self.base.merged(snapshot.version, snapshot.adapter, trained, snapshot.canary)
                self._senders = channel.senders
            if others and sends:  # before another version is merged
                others.tell(HoldPart(channel.name, snapshot.version))
            return self._latest
