"""What an engine's work takes: a decode step is a + b * running + c * tokens in KV, prefill is per token.

The cost models that come with April are in `hardware.toml`.
"""

import math
import tomllib
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from april.config.loading import sentence
from april.config.section import Section
from april.errors import ConfigError

HARDWARE = Path(__file__).with_name("hardware.toml")


class EngineCost(Section):
    """One engine, which may be several accelerators that work as one."""

    source: str = Field("", description="where the figures come from")
    decode_base_s: float = Field(gt=0, description="a: of a decode step, whatever runs (seconds)")
    decode_running_s: float = Field(ge=0, description="b: more for each running sequence (seconds)")
    decode_kv_s: float = Field(ge=0, description="c: more for each token in the KV cache (seconds)")
    prefill_s: float = Field(ge=0, description="to compute a token of context (seconds)")
    admit_s: float = Field(0.0, ge=0, description="to take in sequences, however many at a time (seconds)")
    request_s: float = Field(0.0, ge=0, description="more for each of them, beside its context (seconds)")
    kv_tokens: int = Field(1 << 40, ge=1, description="KV capacity (tokens)")

    def context_s(self, sequences: int, tokens: int) -> float:
        """Seconds to take in so many sequences with so many tokens of context together."""
        return self.admit_s + self.request_s * sequences + self.prefill_s * tokens if sequences else 0.0

    def steps_s(self, steps: int, running: int, kv: int) -> float:
        """Seconds of `steps` decode steps, each of which adds a token of KV for each of `running` sequences."""
        first_s = self.decode_base_s + self.decode_running_s * running + self.decode_kv_s * kv
        return steps * first_s + self.decode_kv_s * running * (steps * (steps - 1) // 2)

    def steps_until(self, seconds: float, running: int, kv: int) -> int:
        """The fewest decode steps that take at least `seconds`: the root of the quadratic that `steps_s` is."""
        if seconds <= 0:
            return 0
        growth_s = self.decode_kv_s * running
        first_s = self.decode_base_s + self.decode_running_s * running + self.decode_kv_s * kv
        half = first_s - growth_s / 2
        root = half + math.sqrt(half * half + 2 * growth_s * seconds)
        steps = max(1, math.ceil(2 * seconds / root - 1e-9))
        return steps if self.steps_s(steps, running, kv) >= seconds * (1 - 1e-12) else steps + 1


def read_tables(path: Path, what: str) -> dict[str, Any]:
    """A TOML file. Raises ConfigError, which calls it `what`."""
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{what} {path} does not exist; give a TOML file such as configs/published.toml") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{what} {path} cannot be read ({error}); mend it") from None


def take_cost(tree: dict[str, Any], path: Path, name: str | None = None) -> dict[str, Any]:
    """The cost model of a file: its [cost], or of its [costs.NAME] and April's the one called `name`, where none is
    named its first, or else April's first. Takes them out of `tree`. Raises ConfigError."""
    own = tree.pop("costs", {})
    if not isinstance(own, dict) or not all(isinstance(one, dict) for one in own.values()):
        raise ConfigError(f"key 'costs' of {path} is no table of cost models; write each as [costs.NAME]")
    if own and "cost" in tree:
        raise ConfigError(
            f"key 'cost' of {path} stands beside costs.{', costs.'.join(own)}; leave one out, or move it to "
            "[costs.measured]"
        )
    if "cost" in tree and name is None:
        found: dict[str, Any] = tree.pop("cost")
        return found
    known = own | {key: cost for key, cost in shipped_costs().items() if key not in own}
    chosen = name or next(iter(known))
    if chosen not in known:
        raise ConfigError(f"option '--cost' = {chosen!r} is neither in {path} nor April's own; use {', '.join(known)}")
    tree.pop("cost", None)
    return dict(known[chosen])


def shipped_costs() -> dict[str, dict[str, Any]]:
    """April's own cost models."""
    costs: dict[str, dict[str, Any]] = tomllib.loads(HARDWARE.read_text())["costs"]
    return costs


class Pacing(Section):
    """What a paced engine keeps to."""

    cost: EngineCost
    update_s: float = Field(0.0, ge=0, description="to take new weights in (seconds)")


def pacing_of(name: str) -> Pacing:
    """`engine.pace`: the name of one of April's cost models, or a file with one, as `april calibrate` writes it; the
    time of an update is its weights.pause_s. Raises ConfigError."""
    path = HARDWARE if name in shipped_costs() else Path(name)
    if path is not HARDWARE and not path.suffix:
        known = ", ".join(shipped_costs())
        raise ConfigError(f"key 'engine.pace' = {name!r} is no cost model; use {known}, or a TOML file")
    tree = read_tables(path, "cost model")
    cost = take_cost(tree, path, name if path is HARDWARE else None)
    update_s = tree.get("weights", {}).get("pause_s", 0.0)
    try:
        return Pacing.model_validate({"cost": cost, "update_s": update_s})
    except ValidationError as error:
        found = sentence(error.errors()[0], Pacing, "april/config/costs.py")
        raise ConfigError(f"cost model {path}: {found}") from None
