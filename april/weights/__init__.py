"""Transfer of new weights from the learner to the workers: over one weight channel per worker, or through snapshots
that workers read. `transports.py` has the ways to carry the bytes."""

from april.util.registry import Registry

TRANSPORTS = Registry(
    "weights.transport",
    "weight transport",
    {
        "collective": "april.weights.transports:CollectiveTransport",
        "cuda_ipc": "april.weights.cuda_ipc:CudaIpcTransport",
        "external": "april.weights.transports:ExternalTransport",
        "pull": "april.weights.transports:PullTransport",
        "shared_memory": "april.weights.transports:SharedMemoryTransport",
    },
    base="april.weights.transports:Transport",
)
