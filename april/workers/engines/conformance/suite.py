"""Runs all conformance checks against a configured engine: `april check engine`."""

import contextlib
import tempfile
import traceback
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from april.config import Config, ConfigError
from april.config.checks import check_engine
from april.config.loading import parse_overrides, set_key, validate
from april.util.errors import NotTried
from april.wire.message import Version
from april.workers.engines import ENGINES
from april.workers.engines.base import Engine
from april.workers.engines.conformance import scores, streams, weights
from april.workers.engines.conformance.harness import CHECKS, TINY_CONTEXT, V0, Bench, TinyModels
from april.workers.engines.entry import device_of

SUBJECTS = (streams, scores, weights)
"""Modules of checks; importing a module appends its checks to `CHECKS`."""
FIRST_CHECKS = (
    streams.a_stream_has_no_gap_and_ends_once, streams.tokens_are_of_the_vocabulary_and_log_probabilities_at_most_zero,
)  # fmt: skip
ONLY_WHOLE_CHUNKS_S = 1e9
Keys = Collection[tuple[str, Any]]
"""Pairs of a configuration key, as "section.key", and its value."""


def check_engine_named(name: str, overrides: list[str], say: Callable[[str], None]) -> int:
    """Run every check that applies to the named engine, report the results, and return the number of failures.

    `overrides`: further configuration keys, as words of the command line. `say`: prints a line. The engine runs on the
    CPU unless the keys say otherwise. Raises ConfigError for an engine that cannot be found or built.
    """
    entry, failures, keys = ENGINES.find(name), 0, parse_overrides(overrides)
    with tempfile.TemporaryDirectory() as folder:
        models = TinyModels(Path(folder))
        check_engine(configured(name, models().folder, keys))
        for check in CHECKS:
            if not check.concerns(entry):
                say(f"left out    {check}: it says that it has no true distribution")
                continue
            try:
                with Engines(name, models, keys) as engines:
                    check.run(Bench(entry, engines, models))
            except ConfigError:
                raise
            except Exception as error:
                failures += 1
                say(f"FELL SHORT  {check}\n{failure_location(error)}")
            else:
                say(f"kept        {check}")
    return failures


def try_engine(name: str, keys: Keys) -> None:
    """Run the checks in FIRST_CHECKS (streams without gaps, valid tokens and log-probabilities) on the engine of this
    name, with a tiny model. `keys`: further configuration keys.

    Raises AssertionError for a failed check, or what the engine raises; ConfigError if the engine cannot be found;
    NotTried if it cannot be built with the tiny model, which may lack files that the engine needs.
    """
    entry = ENGINES.find(name)
    with tempfile.TemporaryDirectory() as folder:
        models = TinyModels(Path(folder))
        try:
            with Engines(name, models, keys) as engines:
                engines(None)
        except ConfigError:
            raise
        except Exception as error:
            said = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise NotTried(f"key 'worker.engine' = {name!r} could not be tried on a tiny model: {said}") from error
        for check in CHECKS:
            if check.function in FIRST_CHECKS:
                with Engines(name, models, keys) as engines:
                    check.run(Bench(entry, engines, models))


def configured(name: str, model: Path, keys: Keys, **worker: Any) -> Config:
    worker = {"engine": name, "device": "cpu", "slots": 8, "chunk_tokens": 7, "report_s": ONLY_WHOLE_CHUNKS_S} | worker
    tree = {"model": {"path": str(model)}, "data": {}, "worker": worker}
    for key, value in keys:
        set_key(tree, key, value)
    return validate(tree)


class Engines:
    """Makes engines of a registry entry for the checks, from a configuration as a worker does (it implements
    `MakeEngine`). At the end of its `with` block it closes all engines."""

    def __init__(self, name: str, models: TinyModels, keys: Keys):
        self._name, self._models, self._keys = name, models, keys
        self._made = contextlib.ExitStack()

    def __call__(self, version: Version | None = V0, *, max_context: int = TINY_CONTEXT, **options: Any) -> Engine:
        model = self._models()
        folder = model.folder if max_context == TINY_CONTEXT else model.with_context(max_context)
        config = configured(self._name, folder, self._keys, **options)
        engine = ENGINES.find(self._name).from_config(config, device_of(config), "check")
        self._made.callback(engine.close)
        if version is not None:
            engine.load_weights(version, model.weights())
        return engine

    def __enter__(self) -> "Engines":
        return self

    def __exit__(self, *error: object) -> None:
        self._made.close()


def failure_location(error: Exception) -> str:
    """The text that tells where a check failed: the source lines of check and engine in the error's traceback, then the
    error itself."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    lines = [f"    {Path(frame.filename).name}:{frame.lineno}: {frame.line}" for frame in frames[1:]]
    return "\n".join([*lines, f"    {type(error).__name__}: {error}".rstrip(": ")])
