"""Complete weights of a version that trains an adapter, for workers that do not have its base model: rank 0 merges
them, or each rank of the learner that sends merges a part."""

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
    """Base model of the adapter."""

    def __init__(self) -> None:
        self._making = threading.Lock()
        self._latest: Snapshot | None = None
        self._senders = 0
        """Number of ranks that have merged a part of the latest."""

    def form_for(
        self, channel: WeightChannel, snapshot: Snapshot, others: PartCommands | None, sends: bool = True
    ) -> Snapshot:
        """The snapshot in the form that the channel's worker accepts: an adapter, or complete weights, of which this is
        rank 0's part if `others` send, too. If it `sends` over the channel, they keep their parts until then."""
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
