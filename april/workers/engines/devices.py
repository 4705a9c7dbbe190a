"""Which accelerators engine and learner want, by the configuration, and what a worker's engine finds here."""

from april.config import Config, ConfigError
from april.workers.engines import ENGINES


def wanted(config: Config) -> tuple[int, int]:
    """By the learner, and by each worker. `auto` takes one where there is one, and so counts."""
    each = ENGINES.find(config.worker.engine).devices(config) if config.worker.device != "cpu" else 0
    return config.learner.ranks if config.learner.device != "cpu" else 0, each


def device_of(config: Config) -> str:
    """What a worker's engine runs on here, "cuda" or "cpu". Raises ConfigError."""
    import torch

    device = config.worker.device if wanted(config)[1] else "cpu"
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("key 'worker.device' = 'cuda' finds no accelerator here; use 'auto' or 'cpu'")
    return device
