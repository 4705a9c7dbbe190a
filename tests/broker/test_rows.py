"""Rows of many samples in one journal event: each row is accepted or rejected, and read back, independently of the
others."""

import pytest

from april.broker.journal.files import JournalError
from april.broker.journal.journal import Journal
from april.broker.ledger.admission import Verdict
from april.broker.ledger.ledger import Ledger
from april.broker.ledger.rules import Rules
from april.wire.message import Version
from april.wire.rows import chunk_row, observation_row, pack_rows, padded

PLAIN = Version(0, 0)
OK, DROPPED = Verdict.OK, Verdict.DROPPED


@pytest.fixture
def journal(tmp_path):
    journal = Journal(tmp_path)
    yield journal
    journal.close()


@pytest.fixture
def leases(journal):
    """(ledger, three leases of one group)."""
    ledger = Ledger(Rules(1, 3, 0, max_response_tokens=20), write=journal.append)
    ledger.start_learner(0)
    group = ledger.open_group(0, 0, floor=0, prompt=b"\1\0\0\0")
    return ledger, [ledger.lease(sample, "w", 0, expires_at=1.0) for sample in group.samples]


def report(ledger, *rows):
    """Report rows of (lease, start, tokens, step, payload) as one table."""
    made = [chunk_row(lease.id, start, count, Version(0, step), "", data) for lease, start, count, step, data in rows]
    payload = b"".join(row[4].ljust(padded(len(row[4])), b"\0") for row in rows)
    return ledger.add_chunks(pack_rows(made), payload)


def payloads(journal, lease):
    return [bytes(payload) for _, payload in journal.read_payloads(lease.sample.chunk_refs)]


def test_an_observation_may_follow_its_turn_within_a_table(leases, journal):
    ledger, (a, *_) = leases
    turn = chunk_row(a.id, 0, 1, PLAIN, "", b"turn")
    answer = observation_row(a.id, 1, 1, "", b"tokenstate")
    late = observation_row(a.id, 2, 1, "", b"late")
    verdicts = ledger.add_chunks(pack_rows([turn, answer, late]), b"turntokenstate\0\0late")
    assert verdicts == [OK, OK, Verdict.INVALID], "an answer to no turn"
    assert [(ref.tokens, ref.observed) for ref in a.sample.chunk_refs] == [(1, False), (1, True)]
    assert payloads(journal, a) == [b"turn", b"tokenstate"]


def test_a_row_is_read_alone_and_checked_against_its_own_checksum(leases, journal, tmp_path):
    ledger, (a, b, _) = leases
    report(ledger, (a, 0, 2, 0, b"aaaa"), (b, 0, 2, 0, b"bbbb"))
    journal.sync()
    (path,) = tmp_path.glob("*.msgpack")
    path.write_bytes(path.read_bytes().replace(b"aaaabbbb", b"aaaXbbbb"))
    assert payloads(journal, b) == [b"bbbb"], "whatever became of its neighbour"
    with pytest.raises(JournalError, match="damaged at position"):
        payloads(journal, a)


def test_a_table_counts_as_its_rows_towards_a_full_file(leases, journal):
    ledger, (a, b, c) = leases
    journal.file_records = journal._records + 3
    report(ledger, (a, 0, 2, 0, b""), (b, 0, 2, 0, b""))
    assert not journal.file_full
    report(ledger, (c, 0, 2, 0, b""))
    assert journal.file_full
