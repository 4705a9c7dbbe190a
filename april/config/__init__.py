"""The one TOML file that describes a run: its keys, their defaults and units, and what is refused.

`load(path, overrides)` returns a validated `Config` or raises `ConfigError`, whose text is one sentence
that names the key, the value and the mend.
"""

from april.config.addresses import check_address, is_loopback
from april.config.data import DataSection, SourceSection
from april.config.loading import load
from april.config.overrides import OVERRIDES, describe_keys, known_keys
from april.config.sections import BrokerSection, Config, LearnerSection, ScheduleSection, WeightsSection
from april.config.workers import AgentSection, EngineSection, ScorerSection, WorkerSection
from april.errors import ConfigError

__all__ = [
    "OVERRIDES",
    "AgentSection",
    "BrokerSection",
    "Config",
    "ConfigError",
    "DataSection",
    "EngineSection",
    "LearnerSection",
    "ScheduleSection",
    "ScorerSection",
    "SourceSection",
    "WeightsSection",
    "WorkerSection",
    "check_address",
    "describe_keys",
    "is_loopback",
    "known_keys",
    "load",
]
