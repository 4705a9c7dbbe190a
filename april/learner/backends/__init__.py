"""Back ends of the learner: what spreads a model over ranks. `entry.py` says what April asks about one before there is
one, `backend.py` what one is to the trainer. A checkpoint of one is gone on from by another."""

from april.registry import Registry

BACKENDS = Registry(
    "learner.backend",
    "back end",
    {
        "fsdp": "april.learner.backends.fsdp.entry:FSDPEntry",
        "megatron": "april.learner.backends.megatron.entry:MegatronEntry",
    },
    base="april.learner.backends.entry:BackendEntry",
)
