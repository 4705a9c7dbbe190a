"""Which leases a worker gives back when a round ends, with a fake engine and a scripted broker."""

import pytest

from april import config as configuration
from april import wire
from april.workers.worker import Worker
from tests.support.scripted_connection import Connection, Engine, grant

WATERMARK = 5


@pytest.fixture
def given_back(config_file):
    """given_back(*script) -> lease ids that the worker gives back for an abort, or for `cause`, in order."""
    config = configuration.load(config_file, ["--reward.where", "scorer"])

    def run(*script, cause="abort", error=""):
        connection = Connection(script)
        Worker(config, Engine(), connection, []).run()
        reports = [message for message in connection.sent if isinstance(message, wire.Report)]
        ended = [closing for report in reports for closing in report.closings]
        return [lease for lease in range(10) if wire.GiveBack(lease, 0, cause, error) in ended]

    return run


def test_an_abort_gives_back_every_lease_up_to_its_watermark(given_back):
    leases = [grant(lease) for lease in (4, WATERMARK, 6)]
    assert given_back(*leases, wire.Abort(0, WATERMARK)) == [4, WATERMARK]


def test_a_grant_that_arrives_after_its_abort_is_given_back_at_once(given_back):
    late = [grant(lease) for lease in (4, WATERMARK, 6)]
    assert given_back(wire.Abort(0, WATERMARK), *late) == [4, WATERMARK]


def test_an_abort_does_not_give_back_evaluation_samples(given_back):
    assert given_back(grant(4, evaluation=True), wire.Abort(0, WATERMARK), grant(3, evaluation=True)) == []


def test_a_sample_whose_row_was_bad_is_given_back_and_any_other_refused_one_is_dropped(given_back):
    reason = "bad row: the policy's token ids are from 0 to 60"
    answers = wire.Answers(rejects=[(4, reason), (6, "chunk refused: fenced")])
    assert given_back(grant(4), grant(6), answers, cause="generation_failed", error=reason) == [4]
