"""Connects a worker's SGLang servers to its weight channel, and loads the weights received over it into a server.

The ranks of all servers join the group in which the learner broadcasts, so that it sends once for all of them. Joining
runs in the weights thread, while the servers generate. Receiving is part of a weight update, which pauses the servers
first, so nothing is broadcast to a server that does not receive.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from itertools import accumulate

from april.util import clock
from april.weights.channel import WORKER, ChannelInvite, link_name
from april.weights.source import StagedWeights
from april.workers.engines.base import EngineError
from april.workers.engines.sglang.client import ServerGone, ServerRefuses, ServerSilent
from april.workers.engines.sglang.engine import SGLangEngine, VerifyWeights
from april.workers.engines.weight_loading import WeightLoader, scored_text

JOIN_TIMEOUT_FACTOR = 5
"""Longest time for a server to join all groups of a channel, as a multiple of the timeout in the learner's invitation:
a gloo group may take several times its timeout to form or fail."""
LEAVE_S = 1.0
"""Longest time to leave all groups of a channel, seconds. It is short because the worker sends no heartbeat
meanwhile."""


class ServerWeightChannel:
    """Implements `InferenceServer`: a worker's SGLang servers as members of a weight channel. When the learner invites
    the worker, the servers that are up join.

    A server that hangs in a group which the learner has given up is reported to its engine, which restarts it.
    """

    def __init__(self, *engines: SGLangEngine):
        self._engines = engines
        self.members: list[int] = []
        """Indices of the servers that have joined the channel, or are joining it."""

    def up(self) -> tuple[bool, ...]:
        """For each server whether it is up, that is, can load weights now. An empty tuple if no server is up."""
        ups = tuple(engine.ready for engine in self._engines)
        return ups if any(ups) else ()

    @property
    def ranks(self) -> int:
        return sum(map(ranks_of, self._joining()))

    @property
    def device(self) -> str:
        return self._engines[0].info.get("device", "cpu")

    def _joining(self) -> list[SGLangEngine]:
        return [engine for engine in self._engines if engine.ready]

    def join(self, invite: ChannelInvite) -> None:
        engines = self._joining()
        self.members = [self._engines.index(engine) for engine in engines]
        asyncio.run(self._join(engines, invite))

    async def _join(self, engines: Sequence[SGLangEngine], invite: ChannelInvite) -> None:
        ranks = [ranks_of(engine) for engine in engines]
        body = {
            "master_address": invite.host,
            "master_port": invite.port,
            "world_size": 1 + sum(ranks),
            "backend": invite.backend,
        }
        offsets = accumulate(ranks, initial=WORKER)
        deadline = clock.now() + JOIN_TIMEOUT_FACTOR * invite.timeout_s
        bodies = [body | {"rank_offset": offset} for _, offset in zip(engines, offsets, strict=False)]
        for sender in range(invite.senders):
            name = {"group_name": link_name(invite.channel, sender)}
            calls = zip(engines, bodies, strict=True)
            await asyncio.gather(*(self._enter(engine, own | name, deadline) for engine, own in calls))

    async def _enter(self, engine: SGLangEngine, body: dict, deadline: float) -> None:
        """Have a server join one process group of the channel. `body`: JSON body of the call
        /init_weights_update_group. `deadline`: Unix time, seconds. A server that does not answer by then is reported to
        its engine as stuck."""
        try:
            await call_once(engine, "/init_weights_update_group", body, deadline)
        except ServerSilent as error:
            engine.suspect(str(error))
            raise

    def leave(self, invite: ChannelInvite) -> None:
        members, self.members = [self._engines[index] for index in self.members], []
        deadline = clock.now() + LEAVE_S

        async def leave_all() -> None:
            await asyncio.gather(*(leave_groups(engine, invite, deadline) for engine in members))

        asyncio.run(leave_all())


async def leave_groups(engine: SGLangEngine, invite: ChannelInvite, deadline: float) -> None:
    with contextlib.suppress(ServerGone):
        for sender in range(invite.senders):
            with contextlib.suppress(ServerRefuses):
                name = link_name(invite.channel, sender)
                await call_once(engine, "/destroy_weights_update_group", {"group_name": name}, deadline)


def ranks_of(engine: SGLangEngine) -> int:
    """Number of a server's tensor-parallel ranks."""
    return engine.info.get("tp_size", 1)


async def call_once(engine: SGLangEngine, path: str, body: dict, deadline: float) -> None:
    """POST `body` as JSON to a server's `path`, over a connection of its own. The server has to answer by `deadline`
    (Unix time, seconds)."""
    client = engine.make_client()
    try:
        await client.call(path, body, max(0.0, deadline - clock.now()))
    finally:
        await client.close()


class ServerWeightLoader(WeightLoader):
    """Loads weights into one SGLang server in the background, while the worker's other servers keep generating."""

    engine: SGLangEngine

    def start_load(self, staged: StagedWeights) -> asyncio.Task:
        verify = self._verifier(staged)
        if staged.externally_loaded and staged.post:
            return self.engine.begin(
                self.engine.update_from_external(staged.version, staged.post, staged.externally_loaded, verify)
            )
        if staged.manifest and staged.post:
            return self.engine.begin(
                self.engine.update_from_broadcast(staged.version, staged.manifest, staged.post, verify, staged.meet)
            )
        tensors = staged.tensors or {}
        if staged.adapter:
            return self.engine.begin(self.engine.update_adapter(staged.version, staged.adapter, tensors, verify))
        return self.engine.begin(self.engine.update_weights(staged.version, tensors, verify))

    def _verifier(self, staged: StagedWeights) -> VerifyWeights | None:
        check, canary = self.weight_check, self.canary_of(staged)
        if not (check and canary):
            return None

        async def verify() -> None:
            try:
                scored = await self.engine.request_score(scored_text(canary, self.engine))
                check.judge(staged, canary, scored, self.engine.dtype)
            except EngineError as error:
                raise check.failure(staged, error) from None

        return verify
