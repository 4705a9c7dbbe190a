"""What an engine's work takes: a decode step is a + b * running + c * tokens in KV, prefill is per token."""

import math

from pydantic import Field

from april.config.sections import Section


class EngineCost(Section):
    """One engine, which may be several accelerators that work as one."""

    source: str = Field("", description="where the figures come from")
    decode_base_s: float = Field(gt=0, description="a: of a decode step, whatever runs (seconds)")
    decode_running_s: float = Field(ge=0, description="b: more for each running sequence (seconds)")
    decode_kv_s: float = Field(ge=0, description="c: more for each token in the KV cache (seconds)")
    prefill_s: float = Field(ge=0, description="to compute a token of context (seconds)")
    admit_s: float = Field(0.0, ge=0, description="to take in sequences, however many at a time (seconds)")
    request_s: float = Field(0.0, ge=0, description="more for each of them, beside its context (seconds)")
    kv_tokens: int = Field(1 << 40, ge=1, description="KV capacity (tokens)")

    def context_s(self, sequences: int, tokens: int) -> float:
        """Seconds to take in so many sequences with so many tokens of context together."""
        return self.admit_s + self.request_s * sequences + self.prefill_s * tokens if sequences else 0.0

    def steps_s(self, steps: int, running: int, kv: int) -> float:
        """Seconds of `steps` decode steps, each of which adds a token of KV for each of `running` sequences."""
        first_s = self.decode_base_s + self.decode_running_s * running + self.decode_kv_s * kv
        return steps * first_s + self.decode_kv_s * running * (steps * (steps - 1) // 2)

    def steps_until(self, seconds: float, running: int, kv: int) -> int:
        """The fewest decode steps that take at least `seconds`: the root of the quadratic that `steps_s` is."""
        if seconds <= 0:
            return 0
        growth_s = self.decode_kv_s * running
        first_s = self.decode_base_s + self.decode_running_s * running + self.decode_kv_s * kv
        half = first_s - growth_s / 2
        root = half + math.sqrt(half * half + 2 * growth_s * seconds)
        steps = max(1, math.ceil(2 * seconds / root - 1e-9))
        return steps if self.steps_s(steps, running, kv) >= seconds * (1 - 1e-12) else steps + 1
