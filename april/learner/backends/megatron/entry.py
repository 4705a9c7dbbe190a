"""Entry of the Megatron-core back end: tensor, pipeline and expert parallelism, checks and native checkpoints."""

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from april.config import Config, ConfigError
from april.config.advantages import needs_critic
from april.learner.backends.entry import BackendEntry
from april.learner.optimizers import DEFAULT
from april.util.errors import refuse

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from april.learner.backends.backend import Backend

PACKAGE = "megatron-core"
LATEST = "latest_checkpointed_iteration.txt"
"""Name of the file that marks a folder as a parent of checkpoint folders, instead of a checkpoint."""


class MegatronEntry(BackendEntry):
    splits_layers = True
    native_files = ("metadata.json", LATEST)

    @classmethod
    def build(cls, config: Config, device: "torch.device") -> "Backend":
        cls.installed_version()
        from april.learner.backends.megatron.backend import MegatronBackend

        return MegatronBackend(config, device)

    @classmethod
    def check(cls, config: Config) -> None:
        super().check(config)
        learner = config.learner
        refused = {
            f"lora.rank = {config.lora.rank}": config.lora.is_set,
            f"algorithm.advantage = {config.algorithm.advantage!r}": needs_critic(config),
            f"sampling.top_k = {config.sampling.top_k}, top_p = {config.sampling.top_p} and "
            f"min_p = {config.sampling.min_p}": config.sampling.is_cut,
            "learner.activation_checkpointing = true": learner.activation_checkpointing,
            "learner.activations_on_host = true": learner.activations_on_host,
            "learner.compile = true": learner.compile,
            f"learner.optimizer = {learner.optimizer!r}": learner.optimizer != DEFAULT,
            "learner.optimizer_on_host = true": learner.optimizer_on_host,
            f"learner.master_weights = {learner.master_weights!r}": learner.master_weights != "fp32",
        }
        for setting, is_set in refused.items():
            if is_set:
                refuse(
                    "learner.backend",
                    learner.backend,
                    f"does not do {setting}",
                    "leave that out, or use the default back end",
                )

    @classmethod
    def installed_version(cls) -> str:
        if find_spec("megatron") is None:
            raise ConfigError(
                f"{PACKAGE} is not installed; call launch/install-megatron.sh and start April from the environment "
                "that it makes"
            )
        try:
            return f"{PACKAGE} {version(PACKAGE)}"
        except PackageNotFoundError:
            return PACKAGE

    @classmethod
    def write_native(cls, folder: Path, out_dir: Path) -> None:
        cls.installed_version()
        from april.learner.backends.megatron import dist_checkpoints

        dist_checkpoints.write(folder, out_dir)

    @classmethod
    def read_native(cls, source: Path, folder: Path) -> "tuple[nn.Module, dict[str, Tensor]]":
        if (source / LATEST).is_file():
            raise ConfigError(
                f"{source} has checkpoints in folders; give one of them, such as {source / 'iter_0000100'}"
            )
        cls.installed_version()
        from april.learner.backends.megatron import dist_checkpoints

        return dist_checkpoints.read(source, folder)
