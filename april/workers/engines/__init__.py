"""Generation engines: they turn prompts into tokens. `base.py` has their interface, `entry.py` their registry entries.

The embedded engines run in the worker's own process; the others drive servers.
"""

from april.util.registry import Registry

ENGINES = Registry(
    "worker.engine",
    "engine",
    {
        "torch": "april.workers.engines.embedded.entry:TorchEntry",
        "paced": "april.workers.engines.embedded.entry:PacedEntry",
        "transformers": "april.workers.engines.embedded.entry:TransformersEntry",
        "sglang": "april.workers.engines.sglang.entry:SGLangEntry",
        "vllm": "april.workers.engines.vllm.entry:VLLMEntry",
    },
    base="april.workers.engines.entry:EngineEntry",
)
