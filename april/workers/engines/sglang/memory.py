"""How much of an accelerator an SGLang server may fill: its `mem_fraction_static`.

That is the part of the memory free at its start that weights and KV cache take together. What else it takes, for
activations and CUDA graphs, is reckoned as SGLang reckons it (0.5.23, `srt/arg_groups/memory_hook.py`).
"""

import math

from april.config import Config
from april.workers.engines.entry import Share

OPTION = "mem_fraction_static"
GIB, MIB = 1 << 30, 1 << 20
CONTEXT_BYTES = GIB
"""of the CUDA context, its kernels and what communicates"""
CHUNKS = ((20, 2048), (60, 4096), (160, 8192), (math.inf, 16384))
"""SGLang's chunks of prefill by accelerators of less memory, in GiB and tokens"""
CHUNK_TOKEN_BYTES, LEAST_CHUNK = 1.5 * MIB, 2048
GRAPH_BYTES, SMALL_GIB, LARGE_BYTES = 512 * MIB, 60, 10 * GIB
"""of CUDA graphs of up to 256 requests; and what is left at least beside weights and cache, on more than so much"""


def share(config: Config, total_bytes: float, free_bytes: float, weight_bytes: float) -> Share:
    """See `EngineEntry.memory_options`; a fraction that the configuration gives stays."""
    left = free_bytes - CONTEXT_BYTES - beside(config, total_bytes)
    fraction = float(config.engine.server.get(OPTION) or math.floor(1000 * left / total_bytes) / 1000)
    return Share({OPTION: fraction}, total_bytes * fraction - weight_bytes)


def beside(config: Config, total_bytes: float) -> float:
    """Bytes that the server takes beside weights and KV cache."""
    server, total_gib = config.engine.server, total_bytes / GIB
    usual = next(tokens for below, tokens in CHUNKS if total_gib < below)
    chunk = int(server.get("chunked_prefill_size", usual))
    activations = 512 * MIB + CHUNK_TOKEN_BYTES * max(chunk, LEAST_CHUNK)
    reckoned = activations + GRAPH_BYTES + config.engine.tensor_ranks * GIB / 8
    return max(reckoned, LARGE_BYTES) if total_gib > SMALL_GIB else reckoned
