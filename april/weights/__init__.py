"""New weights on their way from the learner to the workers, over a lane each; `transport.py` says what carries them."""

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
