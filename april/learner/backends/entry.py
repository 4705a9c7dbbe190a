"""What April asks about a back end before there is one: what it can do, and how it is built. It is read without torch.

An entry is a class, named in `learner.backend`. What it leaves out has the answers below: those of a back end that does
all that the learner has.
"""

from typing import TYPE_CHECKING, ClassVar

from april.config import Config, ConfigError

if TYPE_CHECKING:
    import torch

    from april.learner.backends.backend import Backend


class BackendEntry:
    parks: ClassVar[bool] = False
    """all that it keeps on a device is parameters, buffers and the optimizer's state, so that these may lie on the host
    while others have the device"""
    splits_layers: ClassVar[bool] = False
    """several ranks may share a layer, `learner.tensor_parallel` of them, and divide its experts, which so many do as
    `learner.expert_parallel` says"""

    @classmethod
    def build(cls, config: Config, device: "torch.device") -> "Backend":
        """With the weights of `config.model.path`, over the ranks of the default process group. Collective. Raises
        ConfigError, and ModelError for a model that it cannot train."""
        raise NotImplementedError(f"{cls.__name__} has no build(config, device)")

    @classmethod
    def check(cls, config: Config) -> None:
        """Refuse what it cannot do, before anything is started. Raises ConfigError."""
        ranks = config.learner.ranks
        for key in ("tensor_parallel", "expert_parallel"):
            each = getattr(config.learner, key)
            if each > 1 and not cls.splits_layers:
                raise ConfigError(
                    f"key 'learner.{key}' = {each} splits layers, which learner.backend = "
                    f"{config.learner.backend!r} does not; leave it out"
                )
            if ranks % each:
                raise ConfigError(
                    f"key 'learner.{key}' = {each} does not divide learner.ranks = {ranks}; use one that does"
                )

    @classmethod
    def installed(cls) -> str:
        """What it is made of here, with the version; empty where there is nothing to say. Raises ConfigError where that
        is not installed."""
        return ""
