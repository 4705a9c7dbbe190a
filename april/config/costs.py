"""Cost models of an engine's time: a decode step takes a + b * running + c * tokens in KV, prefill is linear in tokens.

The cost models that come with April are in `hardware.toml`.
"""

import math
import tomllib
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from april.config.loading import error_sentence
from april.config.section import Section
from april.util.errors import ConfigError, refuse

HARDWARE = Path(__file__).with_name("hardware.toml")


class EngineCost(Section):
    """Cost model of one engine, which may be several accelerators that work as one."""

    source: str = Field("", description="Measurement or estimate that the figures of this cost model come from.")
    decode_base_s: float = Field(gt=0, description="a: fixed time of a decode step (seconds).")
    decode_running_s: float = Field(
        ge=0, description="b: additional time of a decode step for each running sequence (seconds)."
    )
    decode_kv_s: float = Field(
        ge=0, description="c: additional time of a decode step for each token in the KV cache (seconds)."
    )
    prefill_s: float = Field(ge=0, description="Prefill time of one token of context (seconds).")
    admit_s: float = Field(
        0.0, ge=0, description="Fixed time to admit waiting sequences, however many at once (seconds)."
    )
    request_s: float = Field(
        0.0, ge=0, description="Additional time for each admitted sequence, besides its prefill (seconds)."
    )
    kv_tokens: int = Field(1 << 40, ge=1, description="Capacity of the KV cache (tokens).")

    def context_s(self, sequences: int, tokens: int) -> float:
        """Seconds to admit `sequences` sequences with `tokens` tokens of context in total."""
        return self.admit_s + self.request_s * sequences + self.prefill_s * tokens if sequences else 0.0

    def steps_s(self, steps: int, running: int, kv: int) -> float:
        """Seconds of `steps` decode steps of `running` sequences, which begin with `kv` tokens in the KV cache."""
        first_s = self.decode_base_s + self.decode_running_s * running + self.decode_kv_s * kv
        return steps * first_s + self.decode_kv_s * running * (steps * (steps - 1) // 2)

    def steps_until(self, seconds: float, running: int, kv: int) -> int:
        """Fewest decode steps of `running` sequences, which begin with `kv` tokens in the KV cache, that take at least
        `seconds`: the root of `steps_s`, a quadratic in the steps."""
        if seconds <= 0:
            return 0
        growth_s = self.decode_kv_s * running
        first_s = self.decode_base_s + self.decode_running_s * running + self.decode_kv_s * kv
        half = first_s - growth_s / 2
        root = half + math.sqrt(half * half + 2 * growth_s * seconds)
        steps = max(1, math.ceil(2 * seconds / root - 1e-9))
        return steps if self.steps_s(steps, running, kv) >= seconds * (1 - 1e-12) else steps + 1


def read_toml(path: Path, noun: str) -> dict[str, Any]:
    """Read a TOML file. Raises ConfigError, whose text calls the file `noun`."""
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{noun} {path} does not exist; give a TOML file such as configs/published.toml") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{noun} {path} cannot be read ({error}); mend it") from None


def pop_cost_model(tree: dict[str, Any], path: Path, name: str | None = None) -> dict[str, Any]:
    """Remove all cost models from `tree`, the content of the file `path`, and return one: that called `name` among its
    [costs.NAME] and April's own; without `name`, its [cost], its first [costs.NAME], or April's first.
    Raises ConfigError."""
    in_file = tree.pop("costs", {})
    if not isinstance(in_file, dict) or not all(isinstance(cost, dict) for cost in in_file.values()):
        refuse("costs", None, f"of {path} is no table of cost models", "write each as [costs.NAME]")
    if in_file and "cost" in tree:
        refuse(
            "cost",
            None,
            f"of {path} stands beside costs.{', costs.'.join(in_file)}",
            "leave one out, or move it to [costs.measured]",
        )
    if "cost" in tree and name is None:
        found: dict[str, Any] = tree.pop("cost")
        return found
    known = in_file | {key: cost for key, cost in shipped_costs().items() if key not in in_file}
    chosen = name or next(iter(known))
    if chosen not in known:
        refuse("--cost", chosen, f"is neither in {path} nor April's own", f"use {', '.join(known)}")
    tree.pop("cost", None)
    return dict(known[chosen])


def shipped_costs() -> dict[str, dict[str, Any]]:
    """Cost models that ship with April, by name."""
    costs: dict[str, dict[str, Any]] = tomllib.loads(HARDWARE.read_text())["costs"]
    return costs


class Pacing(Section):
    """Timing of a paced engine, which imitates the speed of other hardware."""

    cost: EngineCost
    update_s: float = Field(0.0, ge=0, description="Time to load new weights (seconds).")


def pacing_of(name: str) -> Pacing:
    """Timing for `engine.pace`. `name`: a shipped cost model, or a TOML file with one, as `april calibrate` writes it,
    whose weights.pause_s is the time of a weight update (seconds). Raises ConfigError."""
    path = HARDWARE if name in shipped_costs() else Path(name)
    if path is not HARDWARE and not path.suffix:
        known = ", ".join(shipped_costs())
        refuse("engine.pace", name, "is no cost model", f"use {known}, or a TOML file")
    tree = read_toml(path, "cost model")
    cost = pop_cost_model(tree, path, name if path is HARDWARE else None)
    update_s = tree.get("weights", {}).get("pause_s", 0.0)
    try:
        return Pacing.model_validate({"cost": cost, "update_s": update_s})
    except ValidationError as error:
        found = error_sentence(error.errors()[0], Pacing, "april/config/costs.py")
        raise ConfigError(f"cost model {path}: {found}") from None
