"""Which reports a worker keeps, and when it sends them."""

import numpy as np
import pytest

from april import wire
from april.wire.message import Version
from april.wire.rows import read_rows
from april.workers import reports as module
from april.workers.reports import Reports


class Connection:
    def __init__(self):
        self.sent, self.is_silent = [], False

    def send(self, message, arrays=()):
        rows = [(row.lease_id, row.start) for row in read_rows(arrays[0].tobytes())] if arrays else []
        self.sent.append((rows, [closing.lease_id for closing in message.closings]))

    def take(self):
        taken, self.sent = self.sent, []
        return taken


@pytest.fixture
def connection():
    return Connection()


@pytest.fixture
def reports(connection):
    return Reports(connection)


def add(reports, lease_id, start, count=2, **more):
    ids, logprobs = np.arange(count, dtype=np.int32), np.zeros(count, np.float32)
    reports.add_chunk(lease_id, start, ids, logprobs, Version(0, 0), **more)


def score(lease_id):
    return wire.Scored(lease_id, [1.0], [{}])


def test_a_pass_sends_one_report_with_closings_after_all_rows(connection, reports):
    reports.close(score(1))
    add(reports, 1, 0)
    add(reports, 2, 0)
    add(reports, 1, 2)
    reports.send()
    assert connection.take() == [([(1, 0), (1, 2), (2, 0)], [1])]
    reports.send()
    assert connection.take() == [], "nothing is new"


def test_values_of_token_scores_beyond_a_report_go_in_parts_of_their_own(reports, monkeypatch):
    monkeypatch.setattr(module, "MAX_REPORT_BYTES", 40)
    sent, values = [], {lease: np.full(size, lease, np.float32) for lease, size in ((1, 4), (2, 24), (3, 5))}
    reports.connection.send = lambda message, arrays: sent.append(
        ([(closing.lease_id, closing.start) for closing in message.closings], arrays[0].tolist())
    )
    for lease, each in values.items():
        reports.close(wire.TokenScored(lease, [1.0], [{}], columns=[{"a": len(each)}]), each.tobytes())
    reports.send()
    parts = [([(2, start)], [2.0] * size) for start, size in ((0, 10), (10, 10), (20, 4))]
    assert sent == [([(1, 0)], [1.0] * 4), *parts, ([(3, 0)], [3.0] * 5)]


def test_last_rows_wait_briefly_for_their_score(connection, reports, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module.clock, "now", lambda: now[0])
    add(reports, 1, 0, finish_reason="stop", awaits_score=True)
    reports.send()
    assert connection.take() == []
    reports.close(score(1))
    reports.send()
    assert connection.take() == [([(1, 0)], [1])]
    add(reports, 2, 0, finish_reason="stop", awaits_score=True)
    now[0] += module.SCORE_WAIT_S
    reports.send()
    assert connection.take() == [([(2, 0)], [])], "a slow verifier holds no slot"


def test_a_report_beyond_its_limits_is_split_between_rows(connection, reports, monkeypatch):
    monkeypatch.setattr(module, "MAX_REPORT_ROWS", 3)
    monkeypatch.setattr(module, "MAX_REPORT_CLOSINGS", 2)
    for lease_id in range(1, 6):
        add(reports, lease_id, 0)
        reports.close(score(lease_id))
    reports.send()
    assert connection.take() == [
        ([(1, 0), (2, 0), (3, 0)], []), ([(4, 0), (5, 0)], [1, 2]), ([], [3, 4]), ([], [5]),
    ]  # fmt: skip
    monkeypatch.setattr(module, "MAX_REPORT_BYTES", 48 + 16)
    add(reports, 6, 0)
    add(reports, 6, 2)
    reports.send()
    assert connection.take() == [([(6, 0)], []), ([(6, 2)], [])]


def test_reports_wait_while_the_broker_is_silent(connection, reports):
    connection.is_silent = True
    for start in (0, 2, 4):
        add(reports, 1, start)
        reports.send()
    assert connection.take() == []
    connection.is_silent = False
    reports.send()
    assert connection.take() == [([(1, 0), (1, 2), (1, 4)], [])]


def test_rows_are_kept_until_acknowledged_and_resent_from_the_offset_the_broker_asks_for(connection, reports):
    for start in (0, 2, 4):
        add(reports, 1, start)
    reports.close(score(1))
    reports.send()
    connection.take()
    assert reports.acknowledge(1, 2) == 2 and reports.unacknowledged_bytes == 2 * 16
    reports.send_again(1, 4)
    reports.send()
    assert connection.take() == [([(1, 4)], [1])]
    reports.forget(1)
    reports.send_again(1)
    reports.send()
    assert connection.take() == [] and reports.unacknowledged_bytes == 0
