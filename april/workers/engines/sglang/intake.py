"""Loads received weights into an SGLang server in the background, while the worker's other servers keep generating."""

import asyncio

from april.weights.receiver import StagedWeights
from april.workers.engines.base import EngineError
from april.workers.engines.intake import WeightLoader
from april.workers.engines.sglang.engine import SGLangEngine, VerifyWeights


class ServerWeightLoader(WeightLoader):
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
                check.judge(staged, canary, await self.engine.request_score(canary.text), self.engine.dtype)
            except EngineError as error:
                raise check.failure(staged, error) from None

        return verify
