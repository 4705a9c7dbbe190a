"""An engine driven directly: every slot refilled at once, no broker, no barrier, no new weights.

python benchmarks/saturated.py RUN.toml --scenario FILE
"""

import argparse
import random
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from april import config as configuration
from april.data.tokenizer import Tokenizer
from april.simulate.probe import load_folder_weights
from april.simulate.scenario import load_scenario
from april.wire.message import Version
from april.workers.engines.base import Request
from april.workers.process import make_engine

WARM_UP_RESPONSES = 3
"""Responses of each slot before the measurement, until contexts are as long as in the midst of a run."""
SPARE = 8
"""Waiting requests of an engine whose slots are all wanted, so that none is ever idle."""


def prompts(tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """One for each group, as in a run, of which each is like the quickstart's."""
    chance = random.Random(0)
    while True:
        first, second, third = chance.randrange(100), chance.randrange(10), chance.randrange(100)
        yield tokenizer.encode_prompt(f"{first:02}*{second}+{third:02}=").astype(np.int32)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("config", type=Path)
    arguments.add_argument("--scenario", type=Path, required=True, help="has lengths, samples in flight, responses")
    options = arguments.parse_args()
    config, scenario = configuration.load(options.config), load_scenario(options.scenario)
    engine = make_engine(config, "cpu", "saturated")
    engine.load_weights(Version(0, 0), load_folder_weights(config.model.path))
    lengths, in_flight = scenario.make_lengths(), scenario.slots_wanted
    groups = enumerate(prompts(Tokenizer(config.model.path)))
    forced = ((prompt, length) for group, prompt in groups for length in lengths.of(group))
    requests = (Request(number, *request, seed=number) for number, request in enumerate(forced))
    for _ in range(in_flight + (SPARE if in_flight == scenario.engines.slots else 0)):
        engine.submit(next(requests))
    ended, began = 0, None
    while began is None or ended < WARM_UP_RESPONSES * in_flight + scenario.limit_responses:
        for chunk in engine.step():
            if chunk.finish_reason:
                ended += 1
                engine.submit(next(requests))
        if began is None and ended >= WARM_UP_RESPONSES * in_flight:
            began = time.monotonic(), engine.generated_tokens
    print(began[0], time.monotonic(), engine.generated_tokens - began[1], flush=True)
    engine.cancel_all(range(next(requests).id))
    engine.close()


if __name__ == "__main__":
    main()
