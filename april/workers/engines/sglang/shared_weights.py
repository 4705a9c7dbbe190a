"""The weights of a worker with several servers: they come to the worker once, and each server takes them.

    shares = SharedWeights(source, ups=[...], patience_s=60.0).shares       # a `WeightSource` for each server's loader

Where the servers are in one group with the learner, they receive a version together, or none of them begins. If a
server is lost before they begin, the others keep their old weights.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from april.weights.source import StagedWeights, WeightSource
from april.wire.message import Version
from april.wire.training import WeightFolder
from april.workers.engines.base import EngineError


class SharedWeights:
    """Passes the versions of weights of one source to several servers. All methods are called by the worker's main
    loop.

    The source is told that a version is loaded once all servers that are up hold it. If a server needs a version again,
    the source fetches it again, and the other servers keep what they hold.
    """

    def __init__(
        self,
        source: WeightSource,
        ups: Sequence[Callable[[], bool]],
        patience_s: float,
        members: Callable[[], Collection[int]] | None = None,
    ):
        """`source`: where the versions come from. `ups`: for each server a function that tells whether it is up.
        `patience_s`: longest wait (seconds) of a server for the others, where all receive the weights together.
        `members`: function that returns the indices of the servers in the group with the learner; None if the weights
        come to the worker."""
        self.source, self.patience_s, self._members = source, patience_s, members
        self.shares = [ServerShare(self, up) for up in ups]
        self._is_asked = True
        """Whether the source has been asked to fetch weights and has not delivered them yet, so that it is not asked
        twice. True at first, when nothing has been published."""

    def takers(self, version: Version) -> "list[ServerShare]":
        """Shares (`ServerShare`) of the servers that are to load `version` now; the source has staged it. Servers in a
        group with the learner take it all together: the list is empty until each of them can."""
        if self._members is None:
            return [share for share in self.shares if share.up() and version not in (share.held, share.loading)]
        members = [self.shares[index] for index in self._members()]
        return members if all(share.up() and share.loading is None for share in members) else []

    def hand_out(self) -> None:
        """Give the version that the source has staged to the shares (`ServerShare`) that are to load it. If a server
        that is up has no weights, have the source fetch them again."""
        version = self.source.staged_version
        if version and (takers := self.takers(version)) and (staged := self.source.take()):
            barrier = ServerBarrier(len(takers), self.patience_s, staged.post) if staged.post else None
            for share in takers:
                share.receive(staged, barrier)
            self._is_asked = False
        elif version and self._members is None:
            self.settle(version)
        lacking = [share for share in self.shares if share.up() and share.lacks_weights]
        if lacking and not self._is_asked:
            self._is_asked = True
            self.source.forget()

    def settle(self, version: Version) -> None:
        """Tell the source that `version` is loaded, if all servers that are up hold it."""
        if {share.held for share in self.shares if share.up()} == {version}:
            if self._members is None and self.source.staged_version == version:
                self.source.take()  # it came again for a server that is down once more
            self.source.loaded(version)
            self._is_asked = False

    def refuse(self, share: "ServerShare", why: str, wrong: bool) -> None:
        """Have the source fetch a version again that a server failed to load; a server that is down requests it once it
        is up. `why`: the error. `wrong`: the server holds other weights than it was sent."""
        refused, share.loading = share.loading, None
        if not share.up():
            return self.settle(refused) if refused else None
        self._is_asked = True
        self.source.refuse(why, wrong)

    def put_off(self) -> None:
        self.source.put_off(any(share.puts_off for share in self.shares))

    def released(self) -> None:
        self._is_asked = True
        self.source.released()


class ServerShare(WeightSource):
    """The weights of one of several servers, as the source of this server's `WeightLoader`."""

    def __init__(self, shared: SharedWeights, up: Callable[[], bool]):
        super().__init__()
        self.shared, self.up, self.refused = shared, up, shared.source.refused
        self.loading: Version | None = None
        """Version that the server loads at the moment."""
        self.puts_off = False
        self._barrier: ServerBarrier | None = None

    @property
    def lacks_weights(self) -> bool:
        """Whether the server holds no weights, loads none, and has none staged to load."""
        return self.held is None and self.loading is None and self._staged is None

    def receive(self, staged: StagedWeights, barrier: "ServerBarrier | None") -> None:
        """Stage a version for this server to load. `barrier`: where the servers that receive the version together wait
        for each other; None if this server takes it by itself."""
        self._barrier = barrier
        if barrier:
            return self.stage(replace(staged, post=barrier.post, meet=barrier.meet))
        self.stage(replace(staged, tensors=dict(staged.tensors or {})))  # an engine may take tensors out of its own

    def connect(self, address: str, key: str = "") -> None:
        self.shared.source.connect(address, key)

    def offer(self, folders: Sequence[WeightFolder]) -> None:
        self.shared.source.offer(folders)

    def take(self) -> StagedWeights | None:
        self.shared.hand_out()
        staged = super().take()
        self.loading = staged.version if staged else None
        return staged

    @property
    def staged_version(self) -> Version | None:
        if self._staged:
            return self._staged.version
        version = self.shared.source.staged_version
        return version if version and self in self.shared.takers(version) else None

    def loaded(self, version: Version) -> None:
        self.held, self.loading = version, None
        self.shared.settle(version)

    def put_off(self, puts_off: bool) -> None:
        self.puts_off = puts_off
        self.shared.put_off()

    def refuse(self, why: str, wrong: bool = False) -> None:
        if self._barrier and self._barrier.has_failed:  # another server of the group has refused already
            self.loading = None
            return
        self.shared.refuse(self, why, wrong)
        if self._barrier:
            self._barrier.fail(why)

    def released(self) -> None:
        self.held = None
        self.shared.released()

    def forget(self) -> None:
        self.held = None

    def close(self, timeout_s: float = 2.0) -> None:
        if self is self.shared.shares[-1]:
            self.shared.source.close(timeout_s)


class ServerBarrier:
    """A barrier for the servers of one group: each waits in `meet` until all have reached it."""

    def __init__(self, count: int, patience_s: float, post: Callable[[], None]):
        """`count`: number of servers. `post`: tells the learner that all of them are ready for the next part of the
        weights. `patience_s`: longest wait of a server in `meet`, seconds."""
        self.count, self.patience_s, self._post = count, patience_s, post
        self.has_failed = False
        self._why = ""
        self._waiting: list[asyncio.Future[None]] = []
        self._posted = 0

    async def meet(self) -> None:
        """Wait until all servers have reached the barrier. Raises EngineError once one of them has failed, or has not
        reached it within `patience_s`."""
        if self.has_failed:
            raise EngineError(self._why)
        own = asyncio.get_running_loop().create_future()
        self._waiting = [each for each in self._waiting if not each.done()] + [own]  # who was cancelled has left
        if len(self._waiting) == self.count:
            waiting, self._waiting = self._waiting, []
            for each in waiting:
                each.set_result(None)
        try:
            async with asyncio.timeout(self.patience_s):
                await own
        except TimeoutError:
            self.fail("another server of this worker is not ready for weights that all receive together")
            raise EngineError(self._why) from None

    def post(self) -> None:
        """Count a server as ready for the next part, and tell the learner once all are."""
        self._posted += 1
        if self._posted % self.count == 0:
            self._post()

    def fail(self, why: str) -> None:
        """Break the barrier: servers that wait at it, or reach it later, raise EngineError."""
        self.has_failed, self._why = True, self._why or why
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            if not each.done():
                each.set_exception(EngineError(self._why))
