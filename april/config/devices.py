"""The keys of `[devices]`: whether learner and engines share accelerators, and how much memory these have."""

from pydantic import Field

from april.config.section import Section


class DevicesSection(Section):
    """Accelerators of one machine that `april run` places the learner and the engines on."""

    share: bool = Field(False, description="learner and engines are on the same accelerators, and divide their memory")
    turns: bool = Field(False, description="one side at a time has all of the memory, the other lets go of it")
    turn_s: float = Field(1200.0, gt=0, description="longest wait of either side for the other to let go (seconds)")
    memory_gib: float | None = Field(
        None, gt=0, description="memory of each that is shared; none: what those here have (GiB)"
    )
