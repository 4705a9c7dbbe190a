"""Which accelerators each part of a run on one machine gets: learner ranks first, then worker after worker; where they
share, both from the first one on.

A part sees its own alone, and counts them from 0: rank r of the learner takes r, a worker's servers theirs in turn.
"""

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from april.config import Config, ConfigError
from april.workers.engines import ENGINES
from april.workers.engines.devices import wanted

DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""one of them is there wherever Linux has an accelerator for torch, whose import takes seconds"""
ASK_MEMORY = """
import torch
for index in range(torch.cuda.device_count()):
    print(torch.cuda.get_device_properties(index).total_memory)
"""
LOOK_S = 120.0
"""longest import of torch"""
VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
"""what NVIDIA's and AMD's runtimes, and servers on them, read"""


def place(config: Config, devices: Sequence[str]) -> dict[str, list[str]]:
    """As `lay_out`; none where `auto` finds none. Raises ConfigError where parts would have to share but must not."""
    ranks, each = wanted(config)
    insisting = (ranks and config.learner.device == "cuda") or (each and config.worker.device == "cuda")
    if not (ranks or each) or not (devices or insisting):
        return {}
    needed, here = needed_devices(config), len(devices)
    if here < needed:
        mend = "set learner.device and worker.device to 'cpu', or add some"
        if here and ranks and each and not config.devices.share:
            mend = f"set devices.share = true to have both on the same, {mend}"
        raise ConfigError(
            f"{needed} accelerators are wanted and {here} are here, too few for learner.ranks = {ranks} and "
            f"worker.count = {config.worker.count} with {each} each; lower them, {mend}"
        )
    if each:
        ENGINES.find(config.worker.engine).check_placement(config)
    return lay_out(config, devices)


def needed_devices(config: Config) -> int:
    """Accelerators of a run. No two ranks are on one, nor two workers; a rank and a worker where they share."""
    ranks, each = wanted(config)
    for_workers = config.worker.count * each
    return max(ranks, for_workers) if config.devices.share else ranks + for_workers


def lay_out(config: Config, devices: Sequence[str]) -> dict[str, list[str]]:
    """Of the learner and of each worker, by the part's name. Workers begin behind the learner's, or with these where
    they share."""
    ranks, each = wanted(config)
    begin = 0 if config.devices.share else ranks
    placed = {"learner": list(devices[:ranks])} if ranks else {}
    for index in range(config.worker.count if each else 0):
        first = begin + index * each
        placed[f"worker-{index}"] = list(devices[first : first + each])
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


@cache
def memory_here() -> list[float]:
    """Bytes of each accelerator of `visible_devices`. Asked in a process of its own: who asks holds some of it. Raises
    ConfigError where torch does not say."""
    asked = [sys.executable, "-c", ASK_MEMORY]
    try:
        said = subprocess.run(asked, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LOOK_S)
    except subprocess.TimeoutExpired:
        why, found = f"does not say within {LOOK_S:g} s", []
    else:
        why, found = f"does not say ({said.stderr.strip()[-200:] or 'it sees none'})", said.stdout.split()
    if not found:
        raise ConfigError(
            f"key 'devices.share' = true divides the memory of accelerators, and torch {why} how much they have; give "
            "devices.memory_gib, or accelerators of their own"
        )
    return list(map(float, found))


def numa_nodes(devices: Sequence[str], root: Path = Path("/")) -> dict[str, int]:
    """On which node each accelerator of this machine is, by its name in `devices`, which are `visible_devices`; nothing
    of one of which the kernel does not say, or on a machine of one node. NVIDIA's driver tells where its own are."""
    nodes = list((root / "sys/devices/system/node").glob("node[0-9]*"))
    facts = list((root / "proc/driver/nvidia/gpus").glob("*/information"))
    if len(nodes) < 2 or not facts:
        return {}
    addresses = {uuid: file.parent.name for file in facts for uuid in re.findall(r"GPU-([0-9a-f-]+)", file.read_text())}
    found = {}
    for device, uuid in zip(devices, uuids(), strict=False):
        file = root / "sys/bus/pci/devices" / addresses.get(uuid, "unknown") / "numa_node"
        if file.is_file() and (node := int(file.read_text())) >= 0:
            found[device] = node
    return found


def uuids() -> list[str]:
    """Of the accelerators that this process may use, as torch counts them."""
    import torch

    properties = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [str(each.uuid).removeprefix("GPU-") for each in properties]


def check_nodes(config: Config, placed: Mapping[str, Sequence[str]], nodes: Mapping[str, int]) -> None:
    """Refuse a plan by which a worker is on several nodes, where one is wanted. Raises ConfigError."""
    for part, devices in placed.items() if config.worker.one_numa_node else ():
        if part != "learner" and len(found := nodes_of(devices, nodes)) > 1:
            raise ConfigError(
                f"key 'worker.one_numa_node' = true cannot be kept: {part} would get the accelerators "
                f"{', '.join(devices)}, on NUMA nodes {' and '.join(map(str, found))}; change learner.ranks so that "
                f"workers begin at the first of a node, order {VARIABLES[0]} so, or set it to false"
            )


def nodes_of(devices: Sequence[str], nodes: Mapping[str, int]) -> list[int]:
    return sorted({nodes[device] for device in devices if device in nodes})


def of_span(span: str, devices: Sequence[str]) -> list[str]:
    """Those of `devices`, which are `visible_devices`, that FIRST:END means; none where there are none at all. Raises
    ConfigError."""
    first, _, end = span.partition(":")
    if not (first.isdecimal() and end.isdecimal() and int(first) < int(end)):
        raise ConfigError(f"option '--accelerators' = {span!r} is no span; give it as FIRST:END, 0:2 for the first two")
    if devices and int(end) > len(devices):
        raise ConfigError(
            f"option '--accelerators' = {span!r} goes beyond the {len(devices)} that are here; start fewer parts with "
            "accelerators on this machine, or name more machines"
        )
    return list(devices[int(first) : int(end)])


def environment_of(devices: Sequence[str]) -> dict[str, str]:
    """What a part's environment says of its devices; nothing of none, so that it stays as it is."""
    return dict.fromkeys(VARIABLES, ",".join(devices)) if devices else {}


def describe_placement(placed: Mapping[str, Sequence[str]], nodes: Mapping[str, int]) -> list[str]:
    """A line a part. `nodes`: of `numa_nodes`."""
    lines = []
    for part, devices in placed.items():
        found = nodes_of(devices, nodes)
        on = f", on NUMA node{'s' * (len(found) > 1)} {' and '.join(map(str, found))}" if found else ""
        lines.append(f"{part}: {','.join(devices)}{on}")
    return lines
