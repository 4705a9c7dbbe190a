"""Assigns the accelerators of one machine to a run's parts: learner ranks first, then the workers in order. With
devices.share, ranks and workers both start at the first accelerator.

A part sees only its own accelerators, numbered from 0: rank r of the learner uses r, a worker's servers use them in
order.
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
from april.util.errors import refuse
from april.util.registry import python_command
from april.workers.engines import ENGINES
from april.workers.engines.entry import devices_wanted

DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""Device files, one of which exists if Linux has an accelerator for torch; checked to avoid importing torch."""
ASK_MEMORY = """
import torch
print()
print(*(torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count())))
"""
LOOK_S = 120.0
"""Longest wait for the subprocess that asks torch for the memory of the accelerators (seconds)."""
VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
"""Environment variables with the visible devices of NVIDIA's and AMD's runtimes."""


def place_parts(config: Config, devices: Sequence[str]) -> dict[str, list[str]]:
    """Names of the accelerators of the learner and of each worker, by part name, out of `devices`; empty if none is
    needed, or if the configured devices are `auto` and there are none. Raises ConfigError if there are too few."""
    ranks, per_worker = devices_wanted(config)
    required = (ranks and config.learner.device == "cuda") or (per_worker and config.worker.device == "cuda")
    if not (ranks or per_worker) or not (devices or required):
        return {}
    needed, here = needed_devices(config), len(devices)
    if here < needed:
        mend = "set learner.device and worker.device to 'cpu', or add some"
        if here and ranks and per_worker and not config.devices.share:
            mend = f"set devices.share = true to have both on the same, {mend}"
        raise ConfigError(
            f"{needed} accelerators are wanted and {here} are here, too few for learner.ranks = {ranks} and "
            f"worker.count = {config.worker.count} with {per_worker} each; lower them, {mend}"
        )
    if per_worker:
        ENGINES.find(config.worker.engine).check_placement(config)
    return assign_devices(config, devices)


def needed_devices(config: Config) -> int:
    """Number of accelerators that a run needs. Two ranks or two workers never share one; a rank and a worker share one
    if `devices.share` is set."""
    ranks, per_worker = devices_wanted(config)
    for_workers = config.worker.count * per_worker
    return max(ranks, for_workers) if config.devices.share else ranks + for_workers


def assign_devices(config: Config, devices: Sequence[str]) -> dict[str, list[str]]:
    """Names of the accelerators of the learner and of each worker, by part name, out of `devices`. Workers start after
    the learner's accelerators, or at the first one with devices.share."""
    ranks, per_worker = devices_wanted(config)
    begin = 0 if config.devices.share else ranks
    placed = {"learner": list(devices[:ranks])} if ranks else {}
    for index in range(config.worker.count if per_worker else 0):
        first = begin + index * per_worker
        placed[f"worker-{index}"] = list(devices[first : first + per_worker])
    return placed


def visible_devices() -> list[str]:
    """Names of the accelerators that this process may use, as `CUDA_VISIBLE_DEVICES` or `HIP_VISIBLE_DEVICES` lists
    them; without either, numbers from 0."""
    driven = sys.platform != "linux" or any(map(os.path.exists, DRIVERS))
    if not driven or importlib.util.find_spec("torch") is None:
        return []
    import torch

    count = torch.cuda.device_count()
    named = next(filter(None, map(os.environ.get, VARIABLES)), None)
    return (named.split(",") if named else list(map(str, range(count))))[:count]


@cache
def memory_here() -> list[float]:
    """Total memory of each of the `visible_devices`, in their order (bytes). A subprocess asks torch, because asking
    allocates device memory. Raises ConfigError if torch does not answer."""
    asked = python_command("-c", ASK_MEMORY)
    try:
        answer = subprocess.run(asked, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LOOK_S)
    except subprocess.TimeoutExpired:
        why, found = f"does not say within {LOOK_S:g} s", []
    else:
        why = f"does not say ({answer.stderr.strip()[-200:] or 'it sees none'})"
        found = "".join(answer.stdout.splitlines()[-1:]).split()
    if not found:
        refuse(
            "devices.share",
            True,
            f"divides the memory of accelerators, and torch {why} how much they have",
            "give devices.memory_gib, or accelerators of their own",
        )
    return list(map(float, found))


def numa_nodes(devices: Sequence[str], root: Path = Path("/")) -> dict[str, int]:
    """NUMA node of each accelerator by its name in `devices`, which are the `visible_devices`. Accelerators whose node
    is unknown are left out; empty on a machine with one node. Reads NVIDIA's driver files under `root`."""
    nodes = list((root / "sys/devices/system/node").glob("node[0-9]*"))
    facts = list((root / "proc/driver/nvidia/gpus").glob("*/information"))
    if len(nodes) < 2 or not facts:
        return {}
    addresses = {uuid: file.parent.name for file in facts for uuid in re.findall(r"GPU-([0-9a-f-]+)", file.read_text())}
    found = {}
    for device, uuid in zip(devices, device_uuids(), strict=False):
        file = root / "sys/bus/pci/devices" / addresses.get(uuid, "unknown") / "numa_node"
        if file.is_file() and (node := int(file.read_text())) >= 0:
            found[device] = node
    return found


def device_uuids() -> list[str]:
    """UUIDs of the accelerators that this process may use, in torch's order."""
    import torch

    properties = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [str(device.uuid).removeprefix("GPU-") for device in properties]


def check_nodes(config: Config, placed: Mapping[str, Sequence[str]], nodes: Mapping[str, int]) -> None:
    """Raises ConfigError if worker.one_numa_node is set and a worker's accelerators are on several NUMA nodes.
    `placed`: names of accelerators by part; `nodes`: NUMA node by accelerator."""
    for part, devices in placed.items() if config.worker.one_numa_node else ():
        if part != "learner" and len(found := nodes_of(devices, nodes)) > 1:
            refuse(
                "worker.one_numa_node",
                True,
                f"cannot be kept: {part} would get the accelerators {', '.join(devices)}, on NUMA nodes "
                f"{' and '.join(map(str, found))}",
                f"change learner.ranks so that workers begin at the first of a node, order {VARIABLES[0]} so, "
                "or set it to false",
            )


def nodes_of(devices: Sequence[str], nodes: Mapping[str, int]) -> list[int]:
    return sorted({nodes[device] for device in devices if device in nodes})


def devices_in_span(span: str, devices: Sequence[str]) -> list[str]:
    """Devices of a span FIRST:END of `devices`, which are the `visible_devices`; empty if there are none. Raises
    ConfigError for a malformed span or one beyond the last device."""
    first, _, end = span.partition(":")
    if not (first.isdecimal() and end.isdecimal() and int(first) < int(end)):
        refuse("--accelerators", span, "is no span", "give it as FIRST:END, 0:2 for the first two")
    if devices and int(end) > len(devices):
        refuse(
            "--accelerators",
            span,
            f"goes beyond the {len(devices)} that are here",
            "start fewer parts with accelerators on this machine, or name more machines",
        )
    return list(devices[int(first) : int(end)])


def environment_of(devices: Sequence[str]) -> dict[str, str]:
    """Environment variables that restrict a part to its devices; empty without devices, so the environment is
    inherited."""
    return dict.fromkeys(VARIABLES, ",".join(devices)) if devices else {}


def describe_placement(placed: Mapping[str, Sequence[str]], nodes: Mapping[str, int]) -> list[str]:
    """One line per part with its accelerators and their NUMA nodes. `placed`: names of accelerators by part; `nodes`:
    NUMA node by accelerator."""
    lines = []
    for part, devices in placed.items():
        found = nodes_of(devices, nodes)
        on = f", on NUMA node{'s' * (len(found) > 1)} {' and '.join(map(str, found))}" if found else ""
        lines.append(f"{part}: {','.join(devices)}{on}")
    return lines
