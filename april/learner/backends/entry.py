"""Registry entry of a back end: its capabilities, its checks of the configuration, and how to build it.

An entry is a class, named in `learner.backend`, that imports without torch. The defaults below are those of a back end
that supports every feature of the learner.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from april.config import Config
from april.config.algorithms import naming
from april.learner.optimizers import check_optimizer
from april.util.errors import refuse

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from april.learner.backends.backend import Backend


def check_context(config: Config, divides_rows: bool) -> None:
    """Raises ConfigError if `learner.context_parallel` is above 1 and the back end cannot divide packed rows over ranks
    (`divides_rows`: whether it can), or if it does not divide `learner.ranks`."""
    key, size, section = "learner.context_parallel", config.learner.context_parallel, config.learner
    if size > 1 and not divides_rows:
        why = f"divides the tokens of a row over ranks, which learner.backend = {section.backend!r} does not"
        refuse(key, size, why, "leave it out, or use the default back end")
    if section.ranks % size:
        refuse(key, size, f"does not divide learner.ranks = {section.ranks}", "use one that does")


class BackendEntry:
    """Capabilities and constructor of a back end."""

    can_offload: ClassVar[bool] = False
    """Whether the back end's device state is only parameters, buffers and optimizer state, so that it can be offloaded
    to the host while inference engines use the device."""
    splits_layers: ClassVar[bool] = False
    """Whether the back end supports `learner.tensor_parallel`, `learner.expert_parallel` and
    `learner.pipeline_parallel`."""

    divides_rows: ClassVar[bool] = False
    """Whether the back end supports `learner.context_parallel`."""

    holds_teachers: ClassVar[bool] = False
    """Whether the back end can hold a teacher model beside the policy, and compute the policy's divergence from it
    (`algorithm.divergence`)."""

    native_files: ClassVar[Sequence[str]] = ()
    """File names that identify a native checkpoint of the back end (any one suffices); empty: the back end has no
    native format."""

    @classmethod
    def build(cls, config: Config, device: "torch.device") -> "Backend":
        """Build the back end with the weights of `config.model.path`, over the ranks of the default process group.
        Collective. Raises ConfigError, and ModelError for a model that the back end cannot train."""
        raise NotImplementedError(f"{cls.__name__} has no build(config, device)")

    @classmethod
    def check_model(cls, config: Config) -> None:
        """Raises ConfigError for a model that the back end cannot train, and NotTried if this machine could not find
        out, for lack of memory for example. It may import torch: before a run it is called in a process of its own."""

    @classmethod
    def check_images(cls, config: Config) -> None:
        """Raises ConfigError for a model that the back end would train without seeing the images of its prompts. It may
        import torch: before a run it is called in a process of its own."""
        why = "trains no model that sees images, and rows have some"
        fix = "use the default back end, or leave the images out with data.images_key = ''"
        refuse("learner.backend", config.learner.backend, why, fix)

    @classmethod
    def check(cls, config: Config) -> None:
        """Raises ConfigError for a configuration that the back end does not support; called before anything is
        started."""
        check_optimizer(config.learner)
        ranks, whole = config.learner.ranks, f"learner.ranks = {config.learner.ranks}"
        for key in ("pipeline_parallel", "tensor_parallel", "expert_parallel"):
            each = getattr(config.learner, key)
            if each > 1 and not cls.splits_layers:
                refuse(
                    f"learner.{key}",
                    each,
                    f"splits layers, which learner.backend = {config.learner.backend!r} does not",
                    "leave it out",
                )
            if ranks % each:
                refuse(f"learner.{key}", each, f"does not divide {whole}", "use one that does")
            if key == "pipeline_parallel" and each > 1:
                ranks, whole = ranks // each, f"the {ranks // each} ranks of each of learner.pipeline_parallel = {each}"
        check_context(config, cls.divides_rows)
        key, divergence = naming(config, "divergence")
        if divergence and not cls.holds_teachers:
            why = f"compares the policy with a teacher, which learner.backend = {config.learner.backend!r} does not do"
            fix = "leave it out, or use the default back end"
            refuse(key, divergence, why, fix)

    @classmethod
    def installed_version(cls) -> str:
        """Name and installed version of the package that implements the back end; empty if no extra package is needed.
        Raises ConfigError if the package is not installed."""
        return ""

    @classmethod
    def write_native(cls, folder: Path, out_dir: Path) -> None:
        """Write the weights of a Hugging Face folder as a native checkpoint into the empty folder `out_dir`. Raises
        ConfigError and ModelError."""
        raise NotImplementedError(f"{cls.__name__} has no write_native(folder, out_dir)")

    @classmethod
    def read_native(cls, source: Path, folder: Path) -> "tuple[nn.Module, dict[str, Tensor]]":
        """Read the native checkpoint `source`; returns the model of the Hugging Face folder `folder`, on the meta
        device, and its weights by name. Raises ConfigError and ModelError."""
        raise NotImplementedError(f"{cls.__name__} has no read_native(source, folder)")
