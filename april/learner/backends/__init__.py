"""Back ends of the learner, which distribute a model over ranks. `entry.py` has the registry entry of a back end,
`backend.py` its interface to the trainer. Any back end can resume from a checkpoint of another."""

from april.util.registry import Registry

BACKENDS = Registry(
    "learner.backend",
    "back end",
    {
        "fsdp": "april.learner.backends.fsdp.entry:FSDPEntry",
        "megatron": "april.learner.backends.megatron.entry:MegatronEntry",
    },
    base="april.learner.backends.entry:BackendEntry",
)
