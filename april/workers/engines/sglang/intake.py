"""What has arrived through a lane is loaded into an SGLang server, beside everything else: it may take long, and other
servers are behind its worker."""

import asyncio

from april.weights.receiver import Staged
from april.workers.engines.intake import Intake
from april.workers.engines.sglang.engine import SGLangEngine


class ServerIntake(Intake):
    engine: SGLangEngine

    def begin(self, staged: Staged) -> asyncio.Task:
        if staged.manifest and staged.post:
            return self.engine.begin(self.engine.take_broadcast(staged.version, staged.manifest, staged.post))
        return self.engine.begin(self.engine.take_weights(staged.version, staged.tensors or {}))
