"""docs/protocol.md is exact: its tables agree with the code, and a client written from it alone can take every role.

The client (`page_client.py`) knows the protocol from the page only.
"""

import json
import re
import types
import typing
from pathlib import Path

import pytest

from tests.support.page_client import Client, Worker, pack, reward_of, row
from tests.support.run_processes import assert_closed

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
PROSE = " ".join(PAGE.split())
# --- a broker and its clients ------------------------------------------------------------------------------


@pytest.fixture
def broker(start_broker, request):
    return start_broker(*getattr(request, "param", []))


@pytest.fixture
def join(broker):
    clients = []

    def start(kind, *arguments):
        clients.append(kind(broker.address, *arguments))
        return clients[-1]

    yield start
    for client in clients:
        client.close()


@pytest.fixture
def learner(join):
    """A learner that holds the starting policy; version 0.0 exists from here on."""
    learner = join(Client, "learner", "raw-learner")
    learner.hello()
    incarnation, frontier = learner.ask("LearnerAdmitted", "StartLearner", 0, "tcp://127.0.0.1:9").fields
    assert (incarnation, frontier) == (0, 0)
    return learner


@pytest.fixture
def worker(join, learner):
    worker = join(Worker)
    session, run, broker_start, round, watermark, lost, renew_s, *weights = worker.hello()
    assert (run, broker_start, watermark, lost, renew_s) == ("small", 1, 0, [], 15.0) and session and round in (-1, 0)
    assert weights == ["tcp://127.0.0.1:9", "", []]
    worker.send("WorkerCapacity", [0, 0], 10, 0.0)
    return worker


def make_batch(worker, version):
    """Complete samples until a round ends; returns the completed leases by sample."""
    completed = {}
    while not worker.find("Abort"):
        if worker.unseen or worker.wait_for("Grants", "Abort").tag == "Grants":
            worker.next_lease()
        for lease in list(worker.leases.values()):
            worker.complete(lease, 3 + lease.id % 5, version)
            completed[lease.sample] = lease
    return completed


# --- the conversation ---------------------------------------------------------------------------------------------


def test_a_client_written_from_the_page_carries_a_batch_from_prompt_to_consumed(broker, learner, worker, join):
    first = worker.next_training_lease([0, 0])
    assert not first.scoring and first.ids == [] and first.finish_reason == "" and first.reward == "final_answer"
    assert (first.budget, first.temperature, first.top_p, first.top_k) == (24, 1.0, 1.0, 0) and first.label in "01"
    assert first.turn == [0, 0, b"", [], [], [], False] and first.min_p == 0

    worker.generate(first, 3, [0, 0])
    worker.send_chunk(first, 0, first.ids, first.logprobs, [0, 0])
    assert worker.take("Answers").fields == [[[first.id, 3]], [], [], []], "a duplicate changes nothing"
    worker.send_chunk(first, 5, [7], [-1.0], [0, 0])
    assert worker.take("Answers").fields == [[], [], [[first.id, 3]], []], "a gap is asked for"
    worker.report(["Scored", first.id, [1.0], [{}]])
    assert worker.take("Answers").fields == [[], [], [[first.id, 3]], []], "so is a last chunk"

    partial, other = worker.next_training_lease([0, 0]), worker.next_training_lease([0, 0])
    rows = [row(other.id, 0, [7], [-1.0], [0, 0]), row(partial.id, 0, [2, 3], [-0.5, -0.25], [0, 0])]
    worker.report(rows=[*rows, row(partial.id, 2, [4, 5], [-0.5, -0.25], [0, 0]), row(12345, 0, [1], [0.0], [0, 0])])
    acks, *rest = worker.take("Answers").fields
    assert sorted(acks) == sorted([[other.id, 1], [partial.id, 4]]), "one report, one answer"
    assert rest == [[], [], [[12345, "the lease is not current"]]]
    other.ids, other.logprobs, partial.ids = [7], [-1.0], [2, 3, 4, 5]
    worker.acknowledged["generated"] += 5
    worker.leases.pop(partial.id)
    pending = learner.send("Fetch", 0)
    completed = make_batch(worker, [0, 0])
    batch = learner.take("Batch")
    assert batch.sequence == pending
    step, first_group, total, groups, token_scores = batch.fields
    assert token_scores == []
    assert (step, first_group, total, len(groups)) == (0, 0, 4, 4)
    arrays = iter(batch.arrays)
    for group, prompt_tokens, samples, opened_at, delivered_at, number, extra, discarded, held_out, *_ in groups:
        assert (number, extra, discarded, held_out) == (-1, b"", "", ""), "the prompt comes from a file"
        prompt = next(arrays)
        assert prompt_tokens == len(prompt)
        assert opened_at <= delivered_at
        for index, length, reward, finish_reason, segments, details, spans, fork, *kept in samples:
            lease = completed[group, index]
            assert (prompt, next(arrays), next(arrays)) == (lease.prompt, lease.ids, lease.logprobs)
            assert length == len(lease.ids)
            assert (reward, finish_reason) == (reward_of(lease), "stop")
            assert (segments, details) == ([[0, length, [0, 0]]], {})
            assert fork == 0 and kept == [[], 0, "", 0, 0, 0, [], "", b""], "what was not asked for is empty"
            assert [(activity, outcome) for activity, *_, outcome in spans][-2:] == [
                ("generate", "stop"),
                ("score", "scored"),
            ]
    assert list(arrays) == []
    assert learner.ask("Accepted", "Consumed", 0, {"loss": 0.5}).connection == "data"
    assert learner.ask("Accepted", "Consumed", 0, {"loss": 0.5}), "a repetition is accepted"
    assert learner.ask("Accepted", "Durable", 1, 0)

    abort = worker.take("Abort")
    round, worker.watermark = abort.fields
    assert abort.connection == "control" and round == 0 and partial.id <= worker.watermark
    worker.give_back(partial, "abort")
    while worker.has_leases:
        lease = worker.next_lease()
        assert lease.id <= worker.watermark, "nothing of the next round before its version"
        worker.end(lease, [0, 0])
    worker.send("WorkerCapacity", [0, 1], 10, 0.5)
    resumed = worker.next_training_lease([0, 1])
    assert resumed.sample == partial.sample, "partials go first"
    assert (resumed.ids, resumed.budget, resumed.seed) == (partial.ids, 20, partial.seed)
    worker.generate(resumed, 2, [0, 1])

    monitor = join(Client, "monitor", "raw-monitor")
    monitor.hello()
    status = json.loads(bytes(monitor.ask("Status", "StatusRequest").arrays[0]))
    assert status["step"] == 1 and status["state"] == "running" and status["ledger_closed"]
    assert [known["name"] for known in status["workers"]] == ["raw-worker"]
    monitor.ask("Accepted", "StopRun", "seen enough", "stopped")
    stop = worker.take("Stop")
    assert stop.connection == "control" and stop.fields == ["seen enough"]
    worker.receive(100)
    while worker.has_leases:
        worker.next_lease()
    for lease in list(worker.leases.values()):
        worker.give_back(lease, "leave")
    worker.send("Goodbye")
    assert learner.ask("Finished", "Fetch", 1).fields == ["seen enough", []]
    learner.send("Goodbye")
    assert broker.wait() == 0, broker.output
    summary = assert_closed(broker.run_dir)
    assert summary["state"] == "stopped" and summary["steps"] == 1
    assert {name: summary["tokens"][name] for name in worker.acknowledged} == worker.acknowledged
    assert (summary["tokens"]["emitted_unacked"], summary["tokens"]["refused"]) == (0, 1)
    assert not (broker.run_dir / "address").exists()


@pytest.mark.full
@pytest.mark.parametrize("broker", [["--data.source", "submitted"]], indirect=True)
def test_a_client_written_from_the_page_submits_prompts_and_gets_them_back(broker, learner, worker):
    submission = [2, "1", "", b"mine"]
    assert learner.ask("Submitted", "Submit", 0, [submission] * 3, arrays=[("i4", [5, 6] * 3)]).fields == [3]
    assert learner.ask("Submitted", "Submit", 1, [submission] * 3, arrays=[("i4", [7, 8] * 3)]).fields == [4]
    assert learner.ask("Submitted", "Submit", 0, [], arrays=[("i4", [])]).fields == [4]
    learner.send("Submit", 9, [submission], arrays=[("i4", [5, 6])])
    assert "does not follow" in learner.take("Refused").fields[0]
    for _ in range(8):
        lease = worker.next_training_lease([0, 0])
        assert lease.label == "1" and lease.prompt in ([5, 6], [7, 8])
        worker.complete(lease, 2, [0, 0])
    batch = learner.ask("Batch", "Fetch", 0)
    assert [tuple(group[5:7]) for group in batch.fields[3]] == [(number, b"mine") for number in range(4)]


# --- the tables ---------------------------------------------------------------------------------------------------


def rows(text):
    """(name, [(field, type, default)], further cells) of every table row that describes a message or a part."""
    for line in text.splitlines():
        if found := re.match(r"\| `([A-Z]\w+)` \|(.*)\|$", line):
            fields, *cells = found[2].split("|")
            pattern = r"`(\w+)` (.+?)(?: = (.+?))?(?:, (?=`)|$)"
            yield found[1], re.findall(pattern, fields.strip()), [cell.strip() for cell in cells]


def name_of(kind):
    """A field's type in the notation of the page."""
    from april.wire import Name
    from april.wire.message import Address, Number, Seconds
    from april.wire.training import Sha256

    named = {"count": Number, "name": Name, "address": Address, "seconds": Seconds, "sha256": Sha256}
    for name, annotated in named.items():
        if kind == annotated:
            return name
    if typing.get_origin(kind) is typing.Literal:
        return "/".join(json.dumps(value) for value in typing.get_args(kind))
    arguments = [name_of(argument) for argument in typing.get_args(kind)]
    if typing.get_origin(kind) is list:
        return f"[{arguments[0]}]"
    if typing.get_origin(kind) is tuple:
        return f"({', '.join(arguments)})"
    if typing.get_origin(kind) is types.UnionType and type(None) not in typing.get_args(kind):
        return " or ".join(arguments)
    if typing.get_origin(kind) is dict:
        return f"{{{arguments[0]}: {arguments[1]}}}"
    if type(None) in typing.get_args(kind):
        return " or ".join(argument.replace("NoneType", "null") for argument in arguments)
    return kind.__name__.replace("Version", "version")


def test_the_page_names_every_message_with_its_fields_types_and_defaults_in_order():
    import msgspec

    from april import wire
    from april.weights.canary import Canary
    from april.weights.channel import Adapter, AnyChannelMessage, DeltaBase, TensorHead, WeightPart

    described = {name: fields for name, fields, _ in rows(PAGE)}
    assert len(described) == len(list(rows(PAGE))), "a message is described once"
    of_work = [wire.Task, wire.Grant, wire.Scored, wire.TokenScored, wire.GiveBack, wire.Closed]
    of_work += [wire.AgentSession, wire.TurnRequest]
    parts = [
        *of_work, wire.Slots, wire.Submission, wire.GroupHead, wire.SampleHead, wire.SampleSpan, wire.WeightFolder,
        WeightPart, TensorHead, Canary, Adapter, DeltaBase,
    ]  # fmt: skip
    kinds = [*wire.MESSAGES, *typing.get_args(AnyChannelMessage), *parts]
    assert sorted(described) == sorted(kind.__name__ for kind in kinds)
    for kind in kinds:
        expected = []
        for field in msgspec.structs.fields(kind):
            factory = field.default_factory
            default = field.default if factory is msgspec.NODEFAULT else factory()
            text = "" if default is msgspec.NODEFAULT else json.dumps(default, default=bytes.decode)
            expected.append((field.name, name_of(field.type), text))
        assert described[kind.__name__] == expected, kind.__name__


def test_the_page_says_who_may_send_what():
    from april.broker.service import MESSAGES

    senders = {name: cells[0] for name, _, cells in rows(PAGE.partition("## Weight channels")[0]) if len(cells) == 3}
    always = {"Hello", "Bind", "Goodbye"}
    for role, handled in MESSAGES.items():
        may = {name for name, sender in senders.items() if {"any", role} & set(sender.split(", "))}
        assert may - always == {kind.__name__ for kind in handled} | {"Heartbeat"}


def test_the_page_s_example_is_what_its_client_sends():
    header, body = (bytes.fromhex(line) for line in re.findall(r"^    ((?:[0-9a-f]{2} ?)+)$", PAGE, re.M))
    assert pack("Hello", "worker", "w0", "u0", [], 0, sequence=1) == [header, body]


def test_the_page_states_the_broker_s_limits_and_deadlines():
    from april import wire
    from april.broker import server
    from april.config import BrokerSection, LearnerSection
    from april.wire import limits

    broker = BrokerSection()
    for key in ("lease_s", "session_timeout_s", "abort_deadline_s", "readopt_s"):
        assert f"`broker.{key}` ({getattr(broker, key):g})" in PROSE
    assert f"`broker.attempts`, {broker.attempts}" in PROSE
    assert f"after {server.LEAVE_S:g} s ({server.LEAVE_AFTER_SIGNAL_S:g} s" in PROSE
    assert f"`learner.load_s` ({LearnerSection().load_s:g}) if that is longer" in PROSE
    assert f"`learner.hung_s` ({LearnerSection().hung_s:g}) for that" in PROSE
    assert f"`broker.credit_mb` ({broker.credit_mb} MiB)" in PROSE
    assert f"{server.OUTBOX_MESSAGES:,} messages" in PROSE
    to_broker, from_broker = limits.FROM_PEER, limits.FROM_BROKER
    limit = f"{to_broker.frames} frames, {to_broker.arrays} arrays and {to_broker.message_bytes >> 20} MiB"
    assert f"at most {limit}" in PROSE
    assert f"up to {wire.MAX_JOINED_BYTES >> 20} MiB to a frame" in PROSE
    assert f"its body {to_broker.body_bytes >> 10} KiB · max(1, k)." in PROSE
    of_a_report = f"{limits.MAX_REPORT_ROWS:,} rows, each of at most {limits.MAX_CHUNK_TOKENS:,} tokens"
    assert f"at most {of_a_report}, and {limits.MAX_REPORT_CLOSINGS} closings" in PROSE
    assert f"a frame above {to_broker.frame_bytes >> 20} MiB costs" in PROSE
    assert f"a body has at most {from_broker.body_bytes >> 20} MiB · max(1, k)" in PROSE
    assert f"a frame {from_broker.frame_bytes >> 30} GiB" in PROSE
    assert f"at most {limits.MAX_STEP_METRICS} of them" in PROSE
    assert f"how many ids, from 1 to {limits.MAX_SUPPORT_IDS:,}" in PROSE
    assert f"Its state, at most {limits.MAX_STATE_BYTES >> 10} KiB, is the environment's" in PROSE
