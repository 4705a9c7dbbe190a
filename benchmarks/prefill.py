"""What computing contexts takes in the torch engine: prompts of groups shared or not, under one load, in turns.

64 slots and groups of 8, new weights after every 64 responses, forced lengths. `apart`: each sample's context is
computed whole, in passes of 4,096 tokens. Times are the processor's, of one thread, so that others weigh less.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from common import Row, parser, report

from april.policy.model import build_model, save_policy
from april.wire.version import Version
from april.workers.engines.base import Request
from april.workers.engines.embedded import engine as embedded
from april.workers.engines.embedded.decoder import Decoder
from april.workers.engines.folder_weights import load_folder_weights

SLOTS, GROUP_SIZE, BATCH = 64, 8, 64
MEDIAN, BETWEEN, WITHIN, LONGEST = 128, 0.6, 0.35, 466
PROMPTS = (8, 128, 256)
WARM_UP = 2
"""batches"""


@dataclass
class Turn:
    generated: int = 0
    computed: int = 0
    """tokens of contexts, with padding"""
    prefill_s: float = 0.0
    busy_s: float = 0.0


class Gauged(embedded.TorchEngine):
    """`apart`: nothing is shared."""

    def __init__(self, folder: Path, apart: bool):
        super().__init__(folder, slots=SLOTS, chunk_tokens=1 << 20, report_s=1e9)
        self.turn, self.apart = Turn(), apart
        if apart:
            self._pass_tokens = self.prefill_tokens

    def _prefill(self, decoder: Decoder) -> None:
        began = time.process_time()
        super()._prefill(decoder)
        self.turn.prefill_s += time.process_time() - began

    def _waves(self) -> list:
        return [{slot: (slot, 0) for slot in self._unfilled}] if self.apart else super()._waves()

    def _compute(self, decoder: Decoder, slots: np.ndarray, start: int) -> None:
        self.turn.computed += len(slots) * (int(self._table.length[slots].max()) - 1 - start)
        super()._compute(decoder, slots, start)


def requests(vocabulary: int, prompt_tokens: int, seed: int) -> Iterator[Request]:
    rng, number = np.random.default_rng(seed), 0
    while True:
        prompt = rng.integers(2, vocabulary, prompt_tokens).astype(np.int32)
        median = MEDIAN * np.exp(BETWEEN * rng.normal())
        for _ in range(GROUP_SIZE):
            number += 1
            length = int(np.clip(median * np.exp(WITHIN * rng.normal()), 4, LONGEST))
            yield Request(number, prompt, length, seed=number)


def run_turn(folder: Path, prompt_tokens: int, batches: int, seed: int, apart: bool) -> Turn:
    weights, engine = load_folder_weights(folder), Gauged(folder, apart)
    source = requests(engine.shape.vocabulary, prompt_tokens, seed)
    began, generated = 0.0, 0
    for batch in range(WARM_UP + batches):
        if batch == WARM_UP:
            engine.turn, began, generated = Turn(), time.process_time(), engine.generated_tokens
        engine.load_weights(Version(0, batch), weights)
        done = 0
        while done < BATCH:
            while engine.live < SLOTS:
                engine.submit(next(source))
            done += sum(chunk.finish_reason is not None for chunk in engine.step())
    turn = replace(engine.turn, generated=engine.generated_tokens - generated, busy_s=time.process_time() - began)
    engine.close()
    return turn


def main() -> None:
    options = parser(__doc__).parse_args()
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory(prefix="april-prefill-") as folder:
        model = build_model(hidden_size=128, layers=3, seed=0)
        model.config.max_position_embeddings = 2 * LONGEST
        save_policy(model, Path(folder))
        for prompt_tokens in PROMPTS:
            turns: dict[str, list[Turn]] = {"": [], "_apart": []}
            for seed in range(1 if options.quick else 3):
                for name, made in turns.items():
                    made.append(run_turn(Path(folder), prompt_tokens, 1 if options.quick else 4, seed, bool(name)))
                    print(f"{prompt_tokens} tokens a prompt{name.replace('_', ', ')}, seed {seed}", file=sys.stderr)
            for name, made in turns.items():
                at = f"_{prompt_tokens}{name}"
                rows += [
                    Row(f"prefill_share_torch{at}", [turn.prefill_s / turn.busy_s for turn in made], "fraction"),
                    Row(
                        f"prefill_computed_torch{at}",
                        [turn.computed / turn.generated for turn in made],
                        "ratio",
                    ),
                    Row(f"prefill_speed_torch{at}", [turn.generated / turn.busy_s for turn in made], "tokens/s"),
                ]
    report(rows, options.json)


if __name__ == "__main__":
    main()
