"""Fuzzer of the broker's protocol: `python -m tests.broker.fuzz --messages 1000000 [--seed 0]`.

A real service with a real journal serves peers that follow the protocol (arena.py). Between their messages it receives
invalid ones (hostile.py). An invalid message must not raise, be recorded, or change the ledger. Each refused message is
answered once and counted once, under one of a few causes, and memory does not grow. Each of three runs receives a third
of `--messages`: a plain one whose trainer submits the prompts, one with every feature on, and one
with agents. One message more per hundred goes over real sockets to a real server (fuzz_sockets.py).
"""

import argparse
import logging
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import orjson

from april import config as configuration
from april import wire
from april.wire import limits
from tests.broker.arena import Arena, digest
from tests.broker.fuzz_sockets import fuzz_sockets
from tests.broker.hostile import Attacker

BATCH = 200
"""Number of attacks between two rounds of the run's own work, and between two comparisons of the ledger."""
MOST_CAUSES = 50
MAX_SESSIONS = 64
MOST_GROWTH = 1.05
"""Largest allowed growth of the process's memory after the first tenth of the messages (ratio)."""
ENDLESS = ["--schedule.max_steps", "1000000000", "--evaluation.prompts", "1"]
SETTINGS = [*ENDLESS, "--security.max_sessions", str(MAX_SESSIONS)]
EVERYTHING = [
    "--reward.where", "scorer", "--worker.engine", "sglang", "--sampling.top_k", "8",
    "--environment.name", "calculator", "--environment.max_turn_tokens", "8",
    "--reward.allowed", '["exact", "group:rewards:rank"]',
]  # fmt: skip
"""Overrides that turn many features on: scorers, token supports, an environment, group rewards."""
SUBMITTED = ["--data.source", "submitted"]
AGENTS = ["--run.name", "agents", "--agent.attach", "true", "--reward.where", "scorer"]


def make_configs(path, folder):
    """Configurations of three runs: a plain one whose trainer submits the prompts, one with every feature on, where
    every other group is scored as a whole, and one with agents."""
    rows = [
        {"prompt": f"{row:02d}*3+60=", "label": "0", "reward": ["exact", "group:rewards:rank"][row % 2]}
        for row in range(64)
    ]
    mixed = folder / "mixed.jsonl"
    mixed.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    everything = ["--run.name", "everything", "--data.path", str(mixed), *EVERYTHING]
    return [configuration.load(path, [*SETTINGS, *more]) for more in (SUBMITTED, everything, AGENTS)]


def fuzz(config, messages, seed=0, report=lambda done: None):
    """Send `messages` attacks to a broker; returns the number of refusals by cause. Raises AssertionError at the first
    failure."""
    chance = random.Random(seed)
    arena = Arena(config, chance)
    attacker, peers = Attacker(arena, chance), arena.service.peers
    for done in range(0, messages, BATCH):
        before = digest(arena.ledger)
        for _ in range(min(BATCH, messages - done)):
            fire(arena, *attacker.attack())
        assert digest(arena.ledger) == before, "the ledger has changed"
        arena.progress()
        assert arena.ledger.account.closed and not arena.service.run.over, arena.service.run.over
        assert len(peers.refusals) <= MOST_CAUSES, peers.refusals
        assert len(peers.by_id) <= MAX_SESSIONS and len(peers.tallies) <= limits.MAX_TALLIES
        report(done + BATCH)
    assert arena.ledger.steps.consumed > messages // 10_000, "the run has to go on meanwhile"
    arena.journal.close()
    return peers.refusals


def fire(arena, route, frames, peer, answer):
    peers = arena.service.peers
    counted, recorded, queued = peers.refusals.total(), arena.events, len(peers.outgoing)
    refused = refused_leases(peers)
    arena.service.handle(route, frames, arena.now, peer)
    answers = [message.message for message in peers.outgoing[queued:]]
    refusals = sum(isinstance(message, wire.Refused) for message in answers) + refused_leases(peers) - refused
    assert arena.events == recorded, (route, frames, answers)
    assert peers.refusals.total() - counted == refusals, (route, frames, answers)
    assert refusals == 1 or answer != "refused", (route, frames, answers)


def refused_leases(peers):
    """Number of rejected leases in the answers that the broker has yet to send."""
    return sum(len(peer.pending.rejects) for peer in peers.by_id.values())


# --- the command ------------------------------------------------------------------------------------------------


def make_run(folder):
    """Write an untrained policy, prompts and the configuration file of a small run; returns the configuration file."""
    from april.learner.policy.arithmetic import build_model, save_policy
    from tests.support.small_run import write_config

    save_policy(build_model(hidden_size=64, layers=1, seed=0), folder / "policy")
    rows = [{"prompt": f"{row:02d}*3+60=", "label": str(row % 2)} for row in range(64)]
    for name in ("train", "heldout"):
        (folder / f"{name}.jsonl").write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return write_config(folder, folder / "policy", folder)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--messages", type=int, default=1_000_000, help="[default 1000000]")
    parser.add_argument("--seed", type=int, default=0, help="[default 0]")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    messages, refusals, began = options.messages // 3, Counter(), time.perf_counter()

    def report(done):
        if done % max(BATCH, messages // 10 // BATCH * BATCH) == 0:
            sizes.append(resident_mib())
            seconds = time.perf_counter() - began
            print(f"{config.run.name:>10} {done:>9} messages, {seconds:6.0f} s, {sizes[-1]:.0f} MiB", flush=True)

    with tempfile.TemporaryDirectory() as name:
        for config in make_configs(make_run(Path(name)), Path(name)):
            sizes = []
            refusals += fuzz(config, messages, options.seed, report)
            assert sizes[-1] <= MOST_GROWTH * sizes[len(sizes) // 10], "memory grows"
        over_sockets = fuzz_sockets(config, options.messages // 100, Path(name), options.seed)
    for cause, count in refusals.most_common():
        print(f"{count:>9} {cause}")
    print(f"{refusals.total():>9} refused of {options.messages}; nothing raised, nothing was recorded")
    print(f"{over_sockets.total():>9} refused of {options.messages // 100} over sockets")
    return 0


def resident_mib():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / (1 << 20)


if __name__ == "__main__":
    sys.exit(main())
