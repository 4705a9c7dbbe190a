"""Accelerators that engines and learner need by the configuration, and the device of a worker on this machine."""

from april.config import Config
from april.errors import refuse
from april.workers.engines import ENGINES


def devices_wanted(config: Config) -> tuple[int, int]:
    """(accelerators of the learner, accelerators of per_worker worker). The device `auto` counts as an accelerator."""
    per_worker = ENGINES.find(config.worker.engine).devices(config) if config.worker.device != "cpu" else 0
    return config.learner.ranks if config.learner.device != "cpu" else 0, per_worker


def device_of(config: Config) -> str:
    """Device of a worker's engine on this machine, "cuda" or "cpu". Raises ConfigError."""
    import torch

    device = config.worker.device if devices_wanted(config)[1] else "cpu"
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        refuse("worker.device", "cuda", "finds no accelerator here", "use 'auto' or 'cpu'")
    return device
