"""Registry entry of the paced engine; it imports no torch."""

from typing import TYPE_CHECKING

from april.config import Config, ConfigError
from april.config.costs import pacing_of
from april.util.errors import refuse
from april.workers.engines.entry import EngineEntry

if TYPE_CHECKING:
    from april.workers.engines.paced.engine import PacedEngine


class PacedEntry(EngineEntry):
    scores = True
    yields_cpu = False
    reads = ("pace", "pace_factor", "pause")

    @classmethod
    def from_config(cls, config: Config, device: str, name: str) -> "PacedEngine":
        from april.workers.engines.base import EngineError
        from april.workers.engines.paced.engine import PacedEngine

        try:
            return PacedEngine(
                config.model.path,
                pacing_of(config.engine.pace),
                config.engine.pace_factor,
                config.run_dir / "paced" / f"{name}.json",
                slots=config.worker.slots,
                device=device,
                chunk_tokens=config.worker.chunk_tokens,
                report_s=config.worker.report_s,
                keep_cache=config.engine.pause == "in_place",
            )
        except EngineError as error:
            raise ConfigError(f"key 'model.path' = {str(config.model.path)!r} cannot be used: {error}") from None

    @classmethod
    def check(cls, config: Config) -> None:
        super().check(config)
        if not config.engine.pace:
            refuse(
                "engine.pace",
                None,
                "is missing: it names the hardware whose time the engine keeps",
                "use h100, or the file that `april calibrate` has written",
            )
        pacing_of(config.engine.pace)
