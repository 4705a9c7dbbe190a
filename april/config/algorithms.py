"""The algorithm of each source of prompts: `[algorithm]`, overridden by the keys of the source's own table."""

from typing import Any, cast

from pydantic import ValidationError

from april.config.section import with_own_keys
from april.config.sections import Config
from april.config.training import AlgorithmSection
from april.util.errors import refuse

OF_THE_RUN = ("preset", "step_scale", "hint")
"""Keys of `[algorithm]` that hold for the whole run and that no source may override: other sections, the optimizer and
the broker depend on them."""


def source_algorithms(config: Config) -> dict[int, AlgorithmSection]:
    """The algorithms of the sources that have their own, by number of the source. Raises ConfigError."""
    sources = enumerate(config.data.sources)
    return {number: own_algorithm(config, number) for number, source in sources if source.algorithm}


def algorithms(config: Config) -> list[AlgorithmSection]:
    """All algorithms of a run: that of `[algorithm]`, then those of sources. Raises ConfigError."""
    return [config.algorithm, *source_algorithms(config).values()]


def divided(config: Config) -> dict[int | None, Config]:
    """One configuration for each algorithm: the run's own under None; under the number of each source that has its own
    algorithm, the configuration of a run with this source alone. Raises ConfigError."""
    own = source_algorithms(config)
    return {None: config} | {number: of_source(config, number, each) for number, each in own.items()}


def of_source(config: Config, number: int, algorithm: AlgorithmSection) -> Config:
    """The configuration of a run in which all samples are of the source `number`, with `algorithm` and that source's
    response budget."""
    sampling = config.sampling.model_copy(update={"max_response_tokens": response_budget(config, number)})
    return config.model_copy(update={"algorithm": algorithm, "sampling": sampling})


def response_budget(config: Config, source: int) -> int:
    """Largest number of tokens that a response to a prompt of the source with the number `source` may have."""
    sources = config.data.sources
    return (sources[source].max_response_tokens if sources else None) or config.sampling.max_response_tokens


def told_of_source(number: int | None, sentence: str) -> str:
    """The `sentence` that refuses a key of `[algorithm]`, preceded by the table of the source with this number;
    unchanged without a number, for the run's own algorithm."""
    return sentence if number is None else f"[algorithm] of data.sources.{number}: {sentence}"


def used_algorithms(config: Config) -> dict[str, AlgorithmSection]:
    """The algorithms that samples are trained with, by the key of their table. Raises ConfigError."""
    own = source_algorithms(config)
    prompt_sources = config.data.prompt_sources
    of_run = {} if prompt_sources and len(own) == len(prompt_sources) else {"algorithm": config.algorithm}
    return of_run | {f"data.sources.{number}.algorithm": each for number, each in own.items()}


def naming(config: Config, key: str) -> tuple[str, str]:
    """The first algorithm in use that sets `key`, a key of `[algorithm]` that names a part, as (whole key, value), such
    as ("data.sources.1.algorithm.divergence", "reverse_kl"); ("", "") if none sets it. Raises ConfigError."""
    found = ((f"{table}.{key}", getattr(each, key)) for table, each in used_algorithms(config).items())
    return next((pair for pair in found if pair[1]), ("", ""))


def named(config: Config, key: str) -> str:
    """Value of `key`, a key of `[algorithm]` that names a part, in the first algorithm in use that sets it; empty if
    none sets it."""
    return naming(config, key)[1]


def algorithm_of(config: Config, source: int) -> AlgorithmSection:
    """The algorithm for samples of a source, by its number. Raises ConfigError."""
    sources = config.data.sources
    return own_algorithm(config, source) if sources and sources[source].algorithm else config.algorithm


def own_algorithm(config: Config, source: int) -> AlgorithmSection:
    own, key = config.data.sources[source].algorithm, f"data.sources.{source}.algorithm"
    if taken := next((name for name in OF_THE_RUN if name in own), ""):
        refuse(f"{key}.{taken}", own[taken], "is one for the whole run", f"set algorithm.{taken}")
    tree: dict[str, Any] = config.algorithm.model_dump(mode="json") | own
    extended = with_own_keys(Config, {"algorithm": tree}, config.own_parts.__contains__)
    model = cast(type[AlgorithmSection], extended.model_fields["algorithm"].annotation)
    known = {name: value for name, value in tree.items() if name in own or name in model.model_fields}
    try:
        return model.model_validate(known)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            refuse(
                f"{key}.{name}", first["input"], "is no key of [algorithm]", "docs/reference/configuration.md has them"
            )
        why = first["msg"].replace("Input", "is refused: it", 1)
        refuse(f"{key}.{name}", first["input"], why, "mend it", error)
