"""Connects an SGLang server to a weight channel, and loads the weights received over it into the server.

The server's ranks join the group in which the learner broadcasts. Joining runs in the weights thread, while the server
generates. Receiving is part of a weight update, which pauses the server first, so nothing is broadcast to a server that
does not receive.
"""

import asyncio
import contextlib

from april.util import clock
from april.weights.channel import WORKER, ChannelInvite, link_name
from april.weights.source import StagedWeights
from april.workers.engines.base import EngineError
from april.workers.engines.sglang.client import ServerGone, ServerRefuses, ServerSilent
from april.workers.engines.sglang.engine import SGLangEngine, VerifyWeights
from april.workers.engines.weight_intake import WeightLoader, scored_text

JOIN_TIMEOUT_FACTOR = 5
"""Longest time for a gloo group to form or fail, as a multiple of its timeout. A server builds the groups of a channel
one after the other; all of them together have this time, since an invitation's timeout counts its groups."""
LEAVE_S = 1.0
"""Longest time to leave all groups of a channel, seconds. It is short because the worker sends no sign of life then."""


class ServerWeightChannel:
    """Implements `InferenceServer` for the current server of an engine.

    A server that hangs in a group which the learner has given up is reported to its engine, which restarts it.
    """

    def __init__(self, engine: SGLangEngine):
        self._engine = engine

    @property
    def ranks(self) -> int:
        return self._engine.info.get("tp_size", 1)

    @property
    def device(self) -> str:
        return self._engine.info.get("device", "cpu")

    def join(self, invite: ChannelInvite) -> None:
        body = {
            "master_address": invite.host,
            "master_port": invite.port,
            "rank_offset": WORKER,
            "world_size": 1 + self.ranks,
            "backend": invite.backend,
        }
        deadline = clock.now() + JOIN_TIMEOUT_FACTOR * invite.timeout_s
        try:
            for sender in range(invite.senders):
                named = body | {"group_name": link_name(invite.channel, sender)}
                self._call("/init_weights_update_group", named, deadline)
        except ServerSilent as error:
            self._engine.suspect(str(error))
            raise

    def leave(self, invite: ChannelInvite) -> None:
        deadline = clock.now() + LEAVE_S
        with contextlib.suppress(ServerGone):
            for sender in range(invite.senders):
                with contextlib.suppress(ServerRefuses):
                    name = link_name(invite.channel, sender)
                    self._call("/destroy_weights_update_group", {"group_name": name}, deadline)

    def _call(self, path: str, body: dict, deadline: float) -> None:
        """Call the server; it has to answer by `deadline` (Unix time, seconds)."""

        async def call() -> None:
            client = self._engine.make_client()
            try:
                await client.call(path, body, max(0.0, deadline - clock.now()))
            finally:
                await client.close()

        asyncio.run(call())


class ServerWeightLoader(WeightLoader):
    """Loads weights in the background, while the worker's other servers keep generating."""

    engine: SGLangEngine

    def start_load(self, staged: StagedWeights) -> asyncio.Task:
        verify = self._verifier(staged)
        if staged.externally_loaded and staged.post:
            return self.engine.begin(
                self.engine.update_from_external(staged.version, staged.post, staged.externally_loaded, verify)
            )
        if staged.manifest and staged.post:
            return self.engine.begin(
                self.engine.update_from_broadcast(staged.version, staged.manifest, staged.post, verify)
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
