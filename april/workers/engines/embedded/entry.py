"""Registry entry of the embedded engine; it imports no torch."""

from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING

from april.config import Config, ConfigError
from april.util.errors import refuse
from april.workers.engines import ENGINES
from april.workers.engines.entry import EngineEntry

if TYPE_CHECKING:
    from april.workers.engines.embedded.engine import TorchEngine


class TorchEntry(EngineEntry):
    scores = True

    @classmethod
    def from_config(cls, config: Config, device: str, name: str) -> "TorchEngine":
        from april.workers.engines.base import EngineError
        from april.workers.engines.embedded.engine import TorchEngine

        try:
            return TorchEngine(
                config.model.path,
                slots=config.worker.slots,
                device=device,
                chunk_tokens=config.worker.chunk_tokens,
                report_s=config.worker.report_s,
                keep_cache=config.engine.pause == "in_place",
            )
        except EngineError as error:
            raise ConfigError(f"key 'model.path' = {str(config.model.path)!r} cannot be used: {error}") from None

    @classmethod
    def installed(cls, config: Config) -> str:
        return f"torch {version('torch')}" if find_spec("torch") else ""

    @classmethod
    def check(cls, config: Config) -> None:
        """Refuse `engine.url`, which names servers. Other keys of [engine] are ignored."""
        if config.engine.url:
            with_servers = ENGINES.names_where(lambda entry: not entry.in_process)
            refuse(
                "engine.url",
                ",".join(config.engine.url),
                f"names servers, and 'worker.engine' is {config.worker.engine!r}, which has none",
                f"set worker.engine = {with_servers}, or leave engine.url out",
            )
