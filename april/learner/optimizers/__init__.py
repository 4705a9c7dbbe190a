"""The learner's optimizers by name, and the schedule of their learning rate. This module imports without torch, so that
any machine can check a configuration."""

import math
from importlib.util import find_spec

from april.config.learner import LearnerSection
from april.config.training import LoraSection
from april.util.errors import ConfigError, refuse
from april.util.registry import Registry

OPTIMIZERS = Registry(
    "learner.optimizer",
    "optimizer",
    {
        "adamw": "april.learner.optimizers.adamw:AdamW",
        "adamw_8bit": "april.learner.optimizers.adamw:AdamW8bit",
        "muon": "april.learner.optimizers.muon:ShardedMuon",
    },
    base="april.learner.optimizers.base:PartOptimizer",
)
DEFAULT = "adamw"
"""Name of the optimizer whose moments a checkpoint has if it names none."""
SMALLER = {"adamw": "adamw_8bit"}
"""Variant of an optimizer that keeps its moments in less memory, by the optimizer's name."""
WHOLE_MATRICES = ("muon",)
"""Optimizers that take whole matrices, and cannot step shards on the host."""
STATE_BYTES = {"adamw": 8.0, "adamw_8bit": 2 + 8 / 256, "muon": 4.0}
"""Name of an optimizer -> bytes that it keeps for each trained parameter; for an optimizer of the user's own, which is
not listed, 8 are assumed. Muon keeps 8 for parameters that are in no matrix of a layer."""
PACKAGES = {"adamw_8bit": ("bitsandbytes", "8bit"), "nf4": ("bitsandbytes", "8bit")}
"""By name of an optimizer or of a form of frozen weights (`lora.base`): (package that it needs, extra of April that
installs the package)."""


def check_optimizer(section: LearnerSection) -> None:
    """Raises ConfigError for an optimizer that takes whole matrices if the section wants its step on the host or
    weights in bf16."""
    if section.optimizer_on_host and section.optimizer in WHOLE_MATRICES:
        refuse(
            "learner.optimizer_on_host",
            True,
            "needs an optimizer that steps each value by itself, and muon takes whole matrices",
            "use adamw or adamw_8bit",
        )
    if section.master_weights == "bf16" and section.optimizer in WHOLE_MATRICES:
        refuse(
            "learner.master_weights",
            section.master_weights,
            "needs an optimizer that steps each value by itself, and muon takes whole matrices",
            "use adamw or adamw_8bit",
        )


def check_installed(learner: LearnerSection, adapter: LoraSection) -> None:
    """Raises ConfigError if torch, or the package that `learner.optimizer` or `lora.base` needs, is not installed. To
    be called on the learner's machines."""
    if find_spec("torch") is None:
        raise ConfigError("torch is not installed; `pip install 'april-rl[learner,worker]'`")
    for key, value in (("learner.optimizer", learner.optimizer), ("lora.base", adapter.base)):
        package, extra = PACKAGES.get(value, ("", ""))
        if package and not find_spec(package):
            refuse(
                key, value, f"needs {package}, which is not installed", f"pip install 'april-rl[{extra}]'",
            )  # fmt: skip


def state_bytes(section: LearnerSection, matrices: float = 0.0) -> float:
    """Bytes on the learner's device that its optimizer keeps for each trained parameter, of which the share `matrices`
    is in the layers' matrices."""
    if section.optimizer_on_host and section.optimizer in STATE_BYTES:
        return 0.0
    kept = STATE_BYTES.get(section.optimizer, 8.0)
    return kept * matrices + 8 * (1 - matrices) if section.optimizer in WHOLE_MATRICES else kept


def lr_share(section: LearnerSection, done: int, batches: int) -> float:
    """Learning rate of the next optimizer step as a share of `learner.lr`. `done`: number of optimizer steps done so
    far; `batches`: number of batches of the whole run on which the policy is trained."""
    total = batches * section.epochs * section.minibatches
    warm = min(1.0, (done + 1) / max(1, section.warmup_steps))
    progress = min(1.0, max(0, done - section.warmup_steps) / max(1, total - section.warmup_steps))
    decayed = {
        "constant": 1.0,
        "linear": 1 - progress,
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
        "wsd": min(1.0, (1 - progress) / section.lr_decay_share),
    }[section.lr_schedule]
    return warm * (section.lr_floor + (1 - section.lr_floor) * decayed)
