"""What the parts of the GPU acceptance share: their arguments, their limit, and rows on disk as soon as measured.

A part is a script of its own, which `acceptance.py` starts, or which runs by itself:
`python benchmarks/gpu/learner.py --device cuda --seconds 120 --out rows.jsonl`.
"""

import argparse
import contextlib
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

STARTED_S = float(os.environ.get("APRIL_GPU_STARTED_S") or time.monotonic())
"""When the part was started, by the clock of `time.monotonic`, which is the machine's: imports take some seconds."""
BENCHMARKS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(BENCHMARKS.parent), str(BENCHMARKS)]  # april, which need not be installed, and its harness

import orjson  # noqa: E402
import torch  # noqa: E402
from common import Row  # noqa: E402

ENOUGH_S = 5.0
"""Seconds that have to be left for another attempt to be begun."""
TRACEBACK_CHARACTERS = 3000


class Part:
    """One part of the acceptance, with a limit in seconds.

    Every row and every fact is appended to the file at once, so that a part which is killed leaves what it had.
    """

    def __init__(self, device: str, tiny: bool, seconds: float, out: Path | None):
        self.device = torch.device(device)
        self.tiny = tiny
        """Whether this rehearses the code: small shapes, and figures that say nothing."""
        self._ends_s = time.monotonic() + seconds
        self.out = out

    @classmethod
    def from_command_line(cls, description: str) -> "Part":
        arguments = argparse.ArgumentParser(description=description)
        arguments.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
        arguments.add_argument("--tiny", action="store_true", help="rehearse the code; the figures say nothing")
        arguments.add_argument("--seconds", type=float, default=120.0, help="no attempt is begun after so many")
        arguments.add_argument("--out", type=Path, metavar="FILE", help="JSON lines: rows and facts, as they come")
        given = arguments.parse_args()
        if given.device == "cuda" and not torch.cuda.is_available():
            sys.exit("torch sees no GPU; run this where there is one, or rehearse it with --device cpu --tiny")
        if given.device == "cpu" and not given.tiny:
            sys.exit("--device cpu rehearses the code; add --tiny, or run this on a machine with a GPU")
        return cls(given.device, given.tiny, STARTED_S + given.seconds - time.monotonic(), given.out)

    @property
    def left_s(self) -> float:
        return self._ends_s - time.monotonic()

    def row(self, name: str, measured: float | Sequence[float], unit: str) -> None:
        """Record a figure and its measurements. `unit`: "ratio", "fraction", "tokens/s", "s", "GB", "GB/s", …"""
        values = [float(measured)] if isinstance(measured, (int, float)) else [float(each) for each in measured]
        self._append(Row(name, values, unit).to_json())

    def fact(self, name: str, value: object) -> None:
        """Record what is no figure: the card, a kernel's name, a traceback, a table."""
        self._append({"fact": name, "value": value})

    @contextlib.contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """A piece of the part, whose failure is a result: its traceback is recorded, and the part goes on.

        The block has to look itself whether `enough_time` is left for it.
        """
        started = time.monotonic()
        try:
            yield
        except Exception as error:
            kind = "out of memory" if isinstance(error, torch.cuda.OutOfMemoryError) else "failed"
            self.fact(f"{what}: {kind}", traceback.format_exc()[-TRACEBACK_CHARACTERS:])
        finally:
            if self.device.type == "cuda":
                with contextlib.suppress(Exception):
                    torch.cuda.empty_cache()
            self.fact(f"{what}: seconds", round(time.monotonic() - started, 2))

    def enough_time(self, what: str, needed_s: float = ENOUGH_S) -> bool:
        """Whether so many seconds are left; records that `what` was left out, if not."""
        if self.left_s >= needed_s or self.tiny:
            return True
        self.fact(f"{what}: left out", f"{self.left_s:.0f} s were left, {needed_s:.0f} s are needed")
        return False

    def _append(self, line: dict) -> None:
        encoded = orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY)
        print(encoded.decode().rstrip(), flush=True)
        if self.out is not None:
            with self.out.open("ab") as file:
                file.write(encoded)


QWEN3_SHAPES = {
    "0.6B": {
        "vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
    },
    "1.7B": {
        "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
    },
    "4B": {
        "vocab_size": 151_936, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
    },
    "small": {
        "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True,
    },
    "tiny": {
        "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True,
    },
}  # fmt: skip
"""Shapes of Qwen3, by the keys of config.json (Qwen's model cards), and two of no model; `tiny` is for rehearsals."""


def random_model(shape: str, dtype: torch.dtype, max_positions: int, device: str = "cpu") -> torch.nn.Module:
    """A model of transformers of this shape with random weights, made on `device`."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    config = Qwen3Config(
        **QWEN3_SHAPES[shape], max_position_embeddings=max_positions, bos_token_id=None, eos_token_id=None, dtype=dtype,
    )  # fmt: skip
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def make_model(folder: Path, shape: str, dtype: torch.dtype, max_positions: int, device: str = "cpu") -> Path:
    """Write a Hugging Face folder with a `random_model`; returns the folder."""
    random_model(shape, dtype, max_positions, device).save_pretrained(folder)
    return folder
