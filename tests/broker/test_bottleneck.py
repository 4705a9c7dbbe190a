"""The broker's statement on the current bottleneck: which part delays the next batch, what workers' slots do, and the
sentence about it."""

import pytest

from april import wire
from april.observe.report.timeline import waiting_for
from tests.support.broker_conversation import FakeWorker, training


def look(talk):
    return talk.status()


def test_the_bottleneck_shows_missing_groups_and_who_has_their_stragglers(talk, worker, learner):
    grants = training(worker.grants())
    first = [grant for grant in grants if grant.group == grants[0].group]
    for grant in first[:-1]:
        worker.complete(grant)
    worker.chunk(first[-1], 0, 3)
    talk.tick(7.0)
    said = look(talk)
    standing = said["standing"]
    (straggler,) = standing["groups"][0]["waits_for"]
    assert standing["groups"][0]["group"] == first[0].group
    assert (straggler["tokens"], straggler["with"], straggler["state"]) == (3, "w0", "leased")
    assert straggler["for_s"] >= 7.0
    assert standing["queue"]["training"]["leased"] == talk.ledger.leases.generating
    batch = standing["batch"]
    assert batch["ready"] + batch["missing"] == batch["needed"] == said["groups_needed"]
    (does,) = [one["does"] for one in said["workers"]]
    assert does["generating"] + does["idle"] == said["workers"][0]["slots"]
    assert waiting_for(said).startswith(
        f"{batch['missing']} of {batch['needed']} groups wait for w0, the longest has 3"
    )
    assert waiting_for(said).endswith("the learner is idle.")


def test_a_lease_that_nobody_renews_is_called_silent(talk, worker, learner):
    grants = training(worker.grants())
    for _ in range(6):
        talk.tick(7.0)
        worker.say(wire.Heartbeat([], 0))
    silent = look(talk)["standing"]["silent"]
    assert {one["group"] for one in silent} >= {grant.group for grant in grants}
    assert all(one["with"] == "w0" and one["silent_s"] >= 42.0 for one in silent)


def test_idle_slots_have_a_cause(talk, learner):
    worker = FakeWorker(talk)
    worker.hello()
    talk.tick()
    worker.hold(0, capacity=100)
    talk.tick()
    assert look(talk)["workers"][0]["does"]["why"] == "nothing to hand out"
    talk.ledger.steps.next = 1
    assert look(talk)["workers"][0]["does"]["why"] == "barrier"
    talk.ledger.steps.consumed = 1
    assert look(talk)["workers"][0]["does"]["why"] == "weights"
    talk.ledger.start_drain()
    assert look(talk)["workers"][0]["does"]["why"] == "drain"


def test_slot_usage_follows_the_worker_s_last_heartbeat(talk, worker, learner):
    grants = training(worker.grants())
    (before,) = look(talk)["workers"]
    tool = [grants[0].lease_id, 12345]
    worker.say(
        wire.Heartbeat(slots=wire.Slots(awaiting_admission=2, awaiting_weights=1, tool_lease_ids=tool)),
        connection=b"control",
    )
    (after,) = look(talk)["workers"]
    does = after["does"]
    assert (does["admission"], does["weights"], does["tool"]) == (2, 1, 1)
    assert does["generating"] == after["leased"] - 4 and does["idle"] == after["slots"] - after["leased"] + 2
    assert before["does"]["generating"] == before["slots"] < before["leased"], "as long as nothing is said"
    waits = [sample for group in look(talk)["standing"]["groups"] for sample in group["waits_for"]]
    assert [sample["state"] for sample in waits].count("tool") == 1
    many = wire.Slots(tool_lease_ids=list(range(talk.config.security.max_leases + 1)))
    worker.say(wire.Heartbeat(slots=many), connection=b"control")
    assert worker.take(wire.Refused)[0].message.reason.startswith("bad message: more leases at a tool")
    worker.say(wire.Heartbeat(slots=wire.Slots(awaiting_weights=99)), connection=b"control")
    assert look(talk)["workers"][0]["does"]["weights"] == after["leased"], "no more than it has"


HELD = {"with": "w2", "groups": 3, "samples": 5, "scoring": 0, "tokens": 7912, "for_s": 41.2}


@pytest.mark.parametrize(
    ("status", "sentence"),
    [
        ({}, "3 of 32 groups wait for w2, the longest has 7,912 tokens, for 41s; the learner is idle."),
        ({"workers": []}, "No worker is connected; the learner is idle."),
        ({"phase": "waiting for weights"}, "Workers wait for weights; the learner is idle."),
        ({"read_only": "the disk is full"}, "The broker can write nothing down: the disk is full."),
        ({"held": [HELD | {"scoring": 5}]}, "3 of 32 groups wait for scores at w2,"),
        ({"held": [HELD | {"tool": 5}]}, "3 of 32 groups wait for tools at w2,"),
        ({"held": [HELD | {"with": "", "for_s": 0.0}]}, "3 of 32 groups wait for a free slot,"),
        ({"held": [HELD | {"groups": 1}, HELD, HELD]}, "1 of 32 groups waits for w2"),
        ({"held": []}, "Nothing of the next batch is open yet;"),
        ({"missing": 0, "learner": {"does": "training"}}, "A batch is complete; the learner trains."),
    ],
)
def test_the_sentence_says_what_the_run_waits_for(status, sentence):
    standing = {
        "learner": status.get("learner", {"does": "idle"}),
        "batch": {"missing": status.get("missing", 3), "needed": 32},
        "holding_up": status.get("held", [HELD]),
    }
    whole = {"workers": [{}], "phase": "generating", "read_only": "", "standing": standing} | status
    assert waiting_for(whole).startswith(sentence)
