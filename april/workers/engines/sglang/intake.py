"""What has arrived through a lane is loaded into an SGLang server, beside everything else: it may take long, and other
servers are behind its worker."""

import asyncio

from april.weights.receiver import Staged
from april.workers.engines.base import EngineError
from april.workers.engines.intake import Intake
from april.workers.engines.sglang.engine import Prove, SGLangEngine


class ServerIntake(Intake):
    engine: SGLangEngine

    def begin(self, staged: Staged) -> asyncio.Task:
        prove = self._prover(staged)
        if staged.brought and staged.post:
            return self.engine.begin(self.engine.take_from_others(staged.version, staged.post, staged.brought, prove))
        if staged.manifest and staged.post:
            return self.engine.begin(self.engine.take_broadcast(staged.version, staged.manifest, staged.post, prove))
        tensors = staged.tensors or {}
        if staged.adapter:
            return self.engine.begin(self.engine.take_adapter(staged.version, staged.adapter, tensors, prove))
        return self.engine.begin(self.engine.take_weights(staged.version, tensors, prove))

    def _prover(self, staged: Staged) -> Prove | None:
        proof, canary = self.proof, self.canary_of(staged)
        if not (proof and canary):
            return None

        async def prove() -> None:
            try:
                proof.judge(staged, canary, await self.engine.ask_score(canary.text), self.engine.dtype)
            except EngineError as error:
                raise proof.failure(staged, error) from None

        return prove
