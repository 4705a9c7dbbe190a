"""The command that keeps token scores: numbers for each token, or each turn, that come with a score."""

from zlib_ng.zlib_ng import crc32

from april.broker.ledger.events import TokensScored
from april.broker.ledger.ledger import Ledger


def score_tokens(ledger: Ledger, lease_id: int, columns: list[dict[str, int]], values: bytes) -> None:
    """Keep token scores of the responses of a lease that is about to be scored. Those of held-out samples and of leases
    that are not current are left out.

    `columns`: for each response, name of each token score -> how many values it has; `values`: all of them, float32.
    """
    lease = ledger.leases.get(lease_id)
    if lease and not lease.generating and not lease.sample.group.evaluation and any(columns):
        ledger.commit(TokensScored(lease_id, columns), [(crc32(values), values)])
