"""Memory share of an SGLang server on an accelerator: its option `mem_fraction_static`.

That is the share of the memory free at its start that weights and KV cache take together. The memory for activations
and CUDA graphs is estimated as SGLang does (0.5.23, `srt/arg_groups/memory_hook.py`).
"""

import math

from april.config import Config
from april.workers.engines.entry import MemoryShare

OPTION = "mem_fraction_static"
GIB, MIB = 1 << 30, 1 << 20
CONTEXT_BYTES = GIB
"""Memory of the CUDA context, its kernels and communication buffers."""
CHUNKS = ((20, 2048), (60, 4096), (160, 8192), (math.inf, 16384))
"""SGLang's default prefill chunk: (accelerator memory below this many GiB, tokens)."""
CHUNK_TOKEN_BYTES, LEAST_CHUNK = 1.5 * MIB, 2048
GRAPH_BYTES, SMALL_GIB, LARGE_BYTES = 512 * MIB, 60, 10 * GIB
"""CUDA graphs of up to 256 requests take GRAPH_BYTES. On accelerators above SMALL_GIB, SGLang reserves at least
LARGE_BYTES besides weights and cache."""


def memory_share(config: Config, total_bytes: float, free_bytes: float, weight_bytes: float) -> MemoryShare:
    """Implements `EngineEntry.memory_options`; a fraction set in the configuration wins."""
    available = free_bytes - CONTEXT_BYTES - other_bytes(config, total_bytes)
    fraction = float(config.engine.server.get(OPTION) or math.floor(1000 * available / total_bytes) / 1000)
    return MemoryShare({OPTION: fraction}, total_bytes * fraction - weight_bytes)


def other_bytes(config: Config, total_bytes: float) -> float:
    """Bytes that the server needs besides weights and KV cache."""
    server, total_gib = config.engine.server, total_bytes / GIB
    usual = next(tokens for below, tokens in CHUNKS if total_gib < below)
    chunk = int(server.get("chunked_prefill_size", usual))
    activations = 512 * MIB + CHUNK_TOKEN_BYTES * max(chunk, LEAST_CHUNK)
    estimate = activations + GRAPH_BYTES + config.engine.tensor_ranks * GIB / 8
    return max(estimate, LARGE_BYTES) if total_gib > SMALL_GIB else estimate
