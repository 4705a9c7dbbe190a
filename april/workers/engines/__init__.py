"""Generation engines: what turns prompts into tokens. `base.py` says what one is, `entry.py` what April asks about one.

The embedded engine runs in the worker's own process; the others drive servers.
"""

from april.registry import Registry

ENGINES = Registry(
    "worker.engine",
    "engine",
    {
        "torch": "april.workers.engines.embedded.entry:TorchEntry",
        "paced": "april.workers.engines.paced.entry:PacedEntry",
        "sglang": "april.workers.engines.sglang.entry:SGLangEntry",
        "vllm": "april.workers.engines.vllm.entry:VLLMEntry",
    },
    base="april.workers.engines.entry:EngineEntry",
)
