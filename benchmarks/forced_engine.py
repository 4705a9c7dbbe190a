"""The paced engine with forced lengths: of each sample those of a scenario, whatever its policy says.

A length belongs to (group, sample), so every schedule has the same, and so has the simulator with the run's seed.
"""

import os
from dataclasses import replace

from april.broker.desks.grants import sample_seed
from april.simulate.lengths import Lengths, LengthsSection
from april.workers.engines.base import Request
from april.workers.engines.paced.engine import PacedEngine
from april.workers.engines.paced.entry import PacedEntry

LENGTHS = "APRIL_FORCED_LENGTHS"
"""environment variable: a `LengthsSection`, JSON"""
GROUPS = 20_000
"""more than a run opens"""


class ForcedEngine(PacedEngine):
    def force(self, lengths: Lengths, seed: int, longest: int) -> None:
        """`longest`: the run's budget of a response (tokens)."""
        self.longest = longest
        self.length_of = {
            sample_seed(seed, group, index): length
            for group in range(GROUPS)
            for index, length in enumerate(lengths.of(group))
        }

    def submit(self, request: Request) -> None:
        left = self.length_of[request.seed] - (self.longest - request.max_new_tokens)
        super().submit(replace(request, max_new_tokens=left, stop_token_ids=frozenset()))


class Entry(PacedEntry):
    @classmethod
    def from_config(cls, config, device, name):
        engine = super().from_config(config, device, name)
        engine.__class__ = ForcedEngine
        section, longest = LengthsSection.model_validate_json(os.environ[LENGTHS]), config.sampling.max_response_tokens
        section = section.model_copy(update={"longest_tokens": min(section.longest_tokens, longest)})
        engine.force(Lengths(section, config.schedule.n_samples_per_prompt, config.seed), config.seed, longest)
        return engine
