"""Length traces: JSON lines with the lengths of one group each, recorded from a run's journal, read by the
simulator."""

from pathlib import Path

import msgspec

from april.config import ConfigError


class TracedGroup(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The lengths of one group: a line of a trace."""

    prompt_tokens: int
    response_tokens: list[int]
    """Response length of each completed sample."""
    max_response_tokens: int = 0
    """Response budget of the run; 0: unknown."""


def read_trace(path: Path) -> list[TracedGroup]:
    """All groups of a trace file. Raises ConfigError for a file that is missing, empty or damaged."""
    if not path.is_file():
        raise ConfigError(f"trace {path} does not exist; record one with `april trace RUN --out {path}`")
    decoder, groups = msgspec.json.Decoder(TracedGroup), []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"trace {path} cannot be read ({error.strerror}); mend it, or give another") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            group = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path} line {number} is not a group of a trace ({error}); mend or remove it") from None
        if group.prompt_tokens < 0 or not group.response_tokens or min(group.response_tokens) < 1:
            raise ConfigError(f"{path} line {number} has no or empty responses; remove that line")
        groups.append(group)
    if not groups:
        raise ConfigError(f"trace {path} has no group; record one with `april trace` of a run that has trained")
    return groups


def budget_of(groups: list[TracedGroup]) -> int:
    """Response budget of the traced run (tokens); the longest response if that is longer or the budget is unknown."""
    return max(max(group.max_response_tokens, *group.response_tokens) for group in groups)


def write_trace(path: Path, groups: list[TracedGroup]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(msgspec.json.encode(group) + b"\n" for group in groups))
