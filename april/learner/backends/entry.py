"""What April asks about a back end before there is one: what it can do, and how it is built. It is read without torch.

An entry is a class, named in `learner.backend`. What it leaves out has the answers below: those of a back end that does
all that the learner has.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from april.config import Config, ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from april.learner.backends.backend import Backend


class BackendEntry:
    parks: ClassVar[bool] = False
    """all that it keeps on a device is parameters, buffers and the optimizer's state, so that these may lie on the host
    while others have the device"""
    splits_layers: ClassVar[bool] = False
    """several ranks may share a layer, `learner.tensor_parallel` of them, and divide its experts, which so many do as
    `learner.expert_parallel` says; and layers may lie on different ranks, in `learner.pipeline_parallel` stages"""

    own_files: ClassVar[Sequence[str]] = ()
    """of which a checkpoint in a form of its own has one; none: it has no such form"""

    @classmethod
    def build(cls, config: Config, device: "torch.device") -> "Backend":
        """With the weights of `config.model.path`, over the ranks of the default process group. Collective. Raises
        ConfigError, and ModelError for a model that it cannot train."""
        raise NotImplementedError(f"{cls.__name__} has no build(config, device)")

    @classmethod
    def check(cls, config: Config) -> None:
        """Refuse what it cannot do, before anything is started. Raises ConfigError."""
        ranks, said = config.learner.ranks, f"learner.ranks = {config.learner.ranks}"
        for key in ("pipeline_parallel", "tensor_parallel", "expert_parallel"):
            each = getattr(config.learner, key)
            if each > 1 and not cls.splits_layers:
                raise ConfigError(
                    f"key 'learner.{key}' = {each} splits layers, which learner.backend = "
                    f"{config.learner.backend!r} does not; leave it out"
                )
            if ranks % each:
                raise ConfigError(f"key 'learner.{key}' = {each} does not divide {said}; use one that does")
            if key == "pipeline_parallel" and each > 1:
                ranks, said = ranks // each, f"the {ranks // each} ranks of each of learner.pipeline_parallel = {each}"

    @classmethod
    def installed(cls) -> str:
        """What it is made of here, with the version; empty where there is nothing to say. Raises ConfigError where that
        is not installed."""
        return ""

    @classmethod
    def write_own(cls, folder: Path, out_dir: Path) -> None:
        """Fill an empty folder: the weights of a Hugging Face folder as a checkpoint in its own form. Raises
        ConfigError and ModelError."""
        raise NotImplementedError(f"{cls.__name__} has no write_own(folder, out_dir)")

    @classmethod
    def read_own(cls, source: Path, folder: Path) -> "tuple[nn.Module, dict[str, Tensor]]":
        """Of a checkpoint in its own form: the outline of a Hugging Face folder's model, and its weights by name.
        Raises ConfigError and ModelError."""
        raise NotImplementedError(f"{cls.__name__} has no read_own(source, folder)")
