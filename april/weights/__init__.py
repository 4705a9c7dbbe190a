"""Transfer of new weights from the learner to the workers, over one weight channel per worker. `transport.py` defines
what carries the bytes."""

from april.registry import Registry

TRANSPORTS = Registry(
    "weights.transport",
    "weight transport",
    {
        "collective": "april.weights.collective:CollectiveTransport",
        "external": "april.weights.external:ExternalTransport",
    },
    base="april.weights.transport:Transport",
)
