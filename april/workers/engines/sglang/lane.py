"""An SGLang server in a lane of the learner's: its ranks join the group, and receive what rank 0 broadcasts.

Joining goes on beside generation, from the weights thread; receiving is part of a change of weights, which pauses the
server first, so that nothing is broadcast to a server that would not take it.
"""

import asyncio
import contextlib

from april.weights.lane import WORKER
from april.weights.lane_messages import LaneInvite
from april.workers.engines.sglang.client import ServerGone, ServerRefuses, ServerSilent
from april.workers.engines.sglang.engine import SGLangEngine

LATEST = 5
"""times its timeout a group over gloo may take to be built, or to fail"""


class ServerLane:
    """Implements `InferenceServer` for the server that an engine has at the moment.

    A server that stays in a group which the learner has given up is stuck: its engine is told to bring it back.
    """

    def __init__(self, engine: SGLangEngine):
        self._engine = engine

    @property
    def ranks(self) -> int:
        return self._engine.info.get("tp_size", 1)

    @property
    def device(self) -> str:
        return self._engine.info.get("device", "cpu")

    def join(self, invite: LaneInvite) -> None:
        body = {
            "master_address": invite.host,
            "master_port": invite.port,
            "rank_offset": WORKER,
            "world_size": 1 + self.ranks,
            "group_name": invite.lane,
            "backend": invite.backend,
        }
        try:
            self._call("/init_weights_update_group", body, LATEST * invite.timeout_s)
        except ServerSilent as error:
            self._engine.suspect(str(error))
            raise

    def leave(self, lane: str) -> None:
        with contextlib.suppress(ServerRefuses, ServerGone):
            self._call("/destroy_weights_update_group", {"group_name": lane}, 1.0)

    def _call(self, path: str, body: dict, deadline_s: float) -> None:
        async def call() -> None:
            client = self._engine.make_client()
            try:
                await client.call(path, body, deadline_s)
            finally:
                await client.close()

        asyncio.run(call())
