"""Which accelerators each part of a run on one machine gets: learner ranks first, then worker after worker.

A part sees its own alone, and counts them from 0: rank r of the learner takes r, a worker's servers theirs in turn.
"""

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence

from april.config import Config, ConfigError
from april.workers.engines import ENGINES
from april.workers.engines.devices import wanted

DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""one of them is there wherever Linux has an accelerator for torch, whose import takes seconds"""
VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
"""what NVIDIA's and AMD's runtimes, and servers on them, read"""


def place(config: Config, devices: Sequence[str]) -> dict[str, list[str]]:
    """As `lay_out`; none where `auto` finds none. Raises ConfigError where parts would have to share but must not."""
    ranks, each = wanted(config)
    insisting = (ranks and config.learner.device == "cuda") or (each and config.worker.device == "cuda")
    if not (ranks or each) or not (devices or insisting):
        return {}
    needed, here = ranks + config.worker.count * each, len(devices)
    if here < max(ranks, each):
        raise ConfigError(
            f"{needed} accelerators are wanted and {here} are here, too few for learner.ranks = {ranks} or a worker "
            f"that takes {each}; lower them, set learner.device and worker.device to 'cpu', or add some"
        )
    if here < needed and config.weights.backend != "gloo":
        raise ConfigError(
            f"{needed} accelerators are wanted and {here} are here, which key 'weights.backend' = "
            f"{config.weights.backend!r} does not let parts share, since NCCL takes one rank on each; set it to "
            "'gloo', lower learner.ranks or worker.count, or add some"
        )
    if each:
        ENGINES.find(config.worker.engine).check_placement(config)
    return lay_out(config, devices)


def lay_out(config: Config, devices: Sequence[str]) -> dict[str, list[str]]:
    """Of the learner and of each worker, by the part's name. Workers for which too few are left share those behind the
    learner's, or all where these do not suffice for one of them."""
    ranks, each = wanted(config)
    for_workers = devices[ranks:] if len(devices) - ranks >= each else devices
    placed = {"learner": list(devices[:ranks])} if ranks else {}
    for index in range(config.worker.count if each else 0):
        first = index % (len(for_workers) // each) * each
        placed[f"worker-{index}"] = list(for_workers[first : first + each])
    return placed


def visible_devices() -> list[str]:
    """Those that this process may use, by the names that a child is told them by."""
    driven = sys.platform != "linux" or any(map(os.path.exists, DRIVERS))
    if not driven or importlib.util.find_spec("torch") is None:
        return []
    import torch

    count = torch.cuda.device_count()
    named = next(filter(None, map(os.environ.get, VARIABLES)), None)
    return (named.split(",") if named else list(map(str, range(count))))[:count]


def environment_of(devices: Sequence[str]) -> dict[str, str]:
    """What a part's environment says of its devices; nothing of none, so that it stays as it is."""
    return dict.fromkeys(VARIABLES, ",".join(devices)) if devices else {}


def describe_placement(placed: Mapping[str, Sequence[str]]) -> list[str]:
    return [f"{part}: {','.join(devices)}" for part, devices in placed.items()]
