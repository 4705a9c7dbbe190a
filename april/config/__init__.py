"""The configuration of a run, from TOML files and overrides: its keys with defaults, units and help, and its checks.

`load(path, overrides)` returns a validated `Config`, or raises a `ConfigError`, one sentence with key, value and fix.
"""

from april.config.addresses import check_address, is_loopback, with_run_keys
from april.config.broker import BrokerSection, WeightsSection
from april.config.data import DataSection, SourceSection
from april.config.learner import LearnerSection
from april.config.loading import OVERRIDES, describe_keys, known_keys, load
from april.config.schedule import ScheduleSection
from april.config.sections import Config
from april.config.workers import AgentSection, EngineSection, ScorerSection, WorkerSection
from april.util.errors import ConfigError

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
    "with_run_keys",
]
