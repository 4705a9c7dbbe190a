"""The keys of `[devices]`: whether learner and engines share accelerators, and how."""

from pydantic import Field

from april.config.section import Section


class DevicesSection(Section):
    """Sharing of one machine's accelerators by the learner and the engines that `april run` places on them."""

    share: bool = Field(
        False,
        description="Place the learner and the engines on the same accelerators and divide their memory. Fewer "
        "accelerators are needed; both slow down while both compute, and weights go through host memory.",
    )
    turns: bool = Field(
        False,
        description="Time sharing: engines and learner use the shared accelerators one after the other, each with "
        "all of the memory, the other's state offloaded to the host. Nothing is generated while the learner "
        "trains.",
    )
    turn_s: float = Field(
        1200.0,
        gt=0,
        description="Longest wait of engines or learner for the other side to release the accelerators (seconds). A "
        "high value detects a hung side late; a low one can end a learner that waits for an evaluation.",
    )
    memory_gib: float | None = Field(
        None,
        gt=0,
        description="Memory to divide on each shared accelerator (GiB). None: what the accelerators here have.",
    )
