"""Random histories of agents against a model: sampled tokens are kept as they are, and each is trained exactly once.

Sessions of an agents process run against the real broker. At random, agents continue, rewrite their history, fork,
repeat calls and hang up, the worker stops in the middle of a turn, and processes are killed."""

import random
from collections import Counter
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest

from april import config as configuration
from april import wire
from april.agents.conversation_tree import ConversationTree, PolicyCall, Refusal
from april.agents.link import rows_with_payloads
from april.agents.rendering import Renderer
from april.broker.handlers.lease_holders import sample_seed
from april.data.tokenizer import Tokenizer
from april.wire.message import Version
from april.wire.rows import observation_row
from tests.support.broker_conversation import Conversation, FakeAgents, FakeLearner, FakeWorker, chunk

PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"
OVERRIDES = ["--evaluation.prompts", "1", "--agent.command", '["true"]', "--sampling.max_response_tokens", "64",
             "--broker.attempts", "1000", "--schedule.rollout_batch_size", "2", "--schedule.n_samples_per_prompt", "2",
             "--schedule.over_sampling_batch_size", "3", "--schedule.max_steps", "40"]  # fmt: skip
SCALE = 1 / 1024
"""The i-th sampled token has log-probability -i * SCALE, which identifies it."""


@dataclass(eq=False)
class ModelTurn:
    """The model's view of a turn."""

    call: PolicyCall
    allowed_prefixes: set[tuple[int, ...]]
    """The token sequences that the policy may read before the answer."""
    turn: object
    parent: "ModelTurn | None"
    ids: list[int] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    """Numbers of its sampled tokens, unique in the test."""
    read: tuple[int, ...] = ()
    complete: bool = False
    requested: bool = True
    """Whether the current execution has called for it."""
    known_to_process: bool = True
    """Whether the agents process knows the messages of its call."""


@dataclass(eq=False)
class Player:
    """The agent of one sample."""

    lease: wire.AgentSession
    session: ConversationTree
    turns: list[ModelTurn] = field(default_factory=list)


class World:
    def __init__(self, seed, config, tokenizer, by_tokens=False):
        """`by_tokens`: histories are rendered anew with each call."""
        self.by_tokens = by_tokens
        self.chance = random.Random(seed)
        self.tokenizer = tokenizer
        self.renderer = Renderer(tokenizer, PLAIN, {}, {})
        self.talk = Conversation(config)
        self.processes, self.sampled, self.step = 0, 0, 0
        self.players, self.leases = {}, {}
        self.fates, self.trained, self.counts = {}, {}, Counter()
        """The expected fate of each token of a training sample, and the tokens that the learner got of each session."""
        self.join()

    def join(self, worker=(), agents=()):
        self.worker, self.learner = FakeWorker(self.talk), FakeLearner(self.talk, "learner")
        self.learner.hello()
        if not self.talk.ledger.learner.uid:
            self.learner.say(wire.StartLearner(0, "tcp://weights"))
        self.worker.join(self.step, 1000, worker)
        self.agents = FakeAgents(self.talk, "a0", f"agents-{self.processes}")
        self.agents.join(12, agents)

    # --- between the two ---

    def send_observation(self, lease_id, start, tokens, request, parent):
        payload = tokens.tobytes() + msgspec.msgpack.encode(request)
        row = observation_row(lease_id, start, len(tokens), "", payload, parent=parent)
        self.agents.report([(row, payload)])
        assert self.agents.answers("acks") == [(lease_id, start + len(tokens))]

    def listen(self):
        for received in self.agents.take(wire.AgentSessionList):
            [lease] = received.message.sessions
            rows = list(rows_with_payloads(*(packed.data for packed in received.packed)))
            player = self.players.get((lease.group, lease.index))
            if player is None or player.lease.lease_id != lease.lease_id:
                session = ConversationTree(lease, self.renderer, self.send_observation, None, self.by_tokens)
                player = self.players[lease.group, lease.index] = Player(lease, session, player.turns if player else [])
                session.receive_rows(rows)
                self.check_restored(player)
            else:
                player.session.receive_rows(rows)
        for received in self.agents.take(wire.SessionTurns):
            for row, payload in rows_with_payloads(*(packed.data for packed in received.packed)):
                for player in self.players.values():
                    if player.lease.lease_id == wire.session_lease_id(row.lease_id):
                        player.session.receive_rows([(row, payload)])
        for player in self.players.values():
            for asked in player.turns:
                if asked.complete and asked.turn.pending_calls:
                    asked.turn.pending_calls, asked.turn.delivered = 0, True

    def check_restored(self, player):
        """A session that is opened again has all turns that the previous process knew."""
        turns = {(turn.fork, turn.index): turn for turn in player.session.turns}
        assert len(turns) == len(player.turns)
        for asked in player.turns:
            expected = turns[asked.turn.fork, asked.turn.index]
            assert (expected.ids, expected.start, expected.complete) == (asked.ids, asked.turn.start, asked.complete)
            asked.turn, asked.requested, asked.known_to_process = expected, False, False

    # --- what agents do ---

    def text(self):
        return "".join(self.chance.choices("0123456789+*", k=self.chance.randint(1, 3)))

    def history_after(self, asked):
        return [*asked.call.messages, {"role": "assistant", "content": self.text_of(asked.ids)}]

    def text_of(self, ids):
        ends = ids[-1] in self.tokenizer.eos_token_ids
        return self.tokenizer.decode(ids[:-1] if ends else ids)

    def a_player(self):
        return self.chance.choice(list(self.players.values()))

    def an_answer(self, player):
        return self.chance.choice([asked for asked in player.turns if asked.complete and asked.requested] or [None])

    def ask(self, player, messages, expected=None, repeated=False):
        """Make a call. `again`: the turns one of which has to answer it."""
        call = PolicyCall(messages, None, 8, (), repeated)
        same = [other for other in player.turns if other.call.messages == messages]
        lost = [other for other in same if other.requested and other.turn.is_abandoned]
        expected = expected or lost[:1] or [other for other in same if not other.requested][:1]
        candidates, allowed_prefixes = self.model(player, messages)
        try:
            turn = player.session.request_turn(call)
        except Refusal as error:
            assert error.code == "context_length_exceeded" and not expected
            return
        turn.pending_calls += 1
        if expected:
            [found] = [other for other in expected if other.turn is turn]
            found.requested = found.known_to_process = True
            return
        assert all(other.turn is not turn for other in player.turns)
        before = (turn.fork, player.session.forks[turn.fork].parent)
        parents = [other for other in candidates if other.turn.fork in before]
        player.turns.append(ModelTurn(call, allowed_prefixes, turn, next(iter(parents), None)))

    def model(self, player, messages):
        """(turns that a call may continue, token sequences that the policy reads then), by the longest repeated
        history."""
        if self.by_tokens:
            return self.model_of_rendered(player, self.encode(messages))
        known = [other for other in player.turns if other.complete and other.known_to_process]
        fits = [
            other
            for other in known
            if messages[: len(other.call.messages) + 1] == self.history_after(other) != messages
        ]
        longest = max((len(other.call.messages) for other in fits), default=-1)
        fits = [other for other in fits if len(other.call.messages) == longest]
        new = self.encode(messages[longest + 1 :] if fits else messages)
        return fits, {(*other.read, *other.ids, *new) for other in fits} or {new}

    def model_of_rendered(self, player, ids):
        """As `model`, where the policy reads the rendered call and nothing else."""
        conversations = {other: (*other.read, *other.ids) for other in player.turns if other.complete}
        fits = [other for other, before in conversations.items() if before == ids[: len(before)] != ids]
        longest = max((len(conversations[other]) for other in fits), default=0)
        return [other for other in fits if len(conversations[other]) == longest], {ids}

    def encode(self, messages):
        return tuple(self.tokenizer.encode_prompt("".join(other["content"] for other in messages)).tolist())

    def ask_first(self):
        self.ask(self.a_player(), [{"role": "user", "content": self.text()}])

    def continue_answer(self):
        player = self.a_player()
        if answer := self.an_answer(player):
            self.ask(player, [*self.history_after(answer), {"role": "user", "content": self.text()}])

    def rewrite(self):
        player = self.a_player()
        if answer := self.an_answer(player):
            messages = [*self.history_after(answer), {"role": "user", "content": self.text()}]
            index = self.chance.randrange(len(messages) - 1)
            messages[index] = messages[index] | {"content": messages[index]["content"] + "="}
            self.ask(player, messages)

    def tools(self):
        """The same tool results in another order are another history."""
        player = self.a_player()
        if answer := self.an_answer(player):
            results = [{"role": "tool", "content": self.text(), "tool_call_id": str(number)} for number in range(2)]
            for order in (results, results[::-1]):
                self.ask(player, [*self.history_after(answer), *order])

    def ask_the_same(self):
        """Repeat a call on purpose, while the first caller still waits or has its answer."""
        player = self.a_player()
        asked = self.chance.choice([other for other in player.turns if other.requested] or [None])
        if asked:
            self.ask(player, asked.call.messages)

    def retry(self):
        player = self.a_player()
        asked = self.chance.choice([other for other in player.turns if other.requested] or [None])
        if asked:
            same = [other for other in player.turns if other.call.messages == asked.call.messages and other.requested]
            self.ask(player, asked.call.messages, same, repeated=True)

    def hang_up(self):
        player = self.a_player()
        waited_for = [other for other in player.turns if other.turn.pending_calls]
        if waited_for:
            self.chance.choice(waited_for).turn.pending_calls = 0

    def replay(self):
        """A replayed agent repeats a call of its earlier execution."""
        player = self.a_player()
        before = next((other for other in player.turns if not other.requested), None)
        if before:
            self.ask(player, before.call.messages)

    # --- what happens to them ---

    def generate(self):
        for grant in self.worker.grants():
            if grant.scoring:
                self.worker.score(grant, self.chance.random())
                continue
            if grant.lease_id not in self.talk.ledger.leases:
                continue  # its session was closed before it arrived
            player = self.players[grant.group, grant.index]
            seeds = {sample_seed(self.talk.config.seed, grant.group, grant.index, n): n for n in range(wire.MAX_FORKS)}
            [asked] = [other for other in player.turns if other.turn.fork == seeds[grant.seed] and not other.complete]
            read = tuple(grant.arrays[1].tolist())
            read, so_far = read[: len(read) - len(asked.ids)], read[len(read) - len(asked.ids) :]
            assert list(so_far) == asked.ids
            assert read in asked.allowed_prefixes, "what was said is read in the tokens that it was said in"
            asked.read = read
            self.leases[grant.lease_id] = grant, asked
        for lease_id, (grant, asked) in list(self.leases.items()):
            if self.chance.random() < 0.5:
                self.sample(lease_id, grant, asked)

    def sample(self, lease_id, grant, asked):
        start = len(asked.read) + len(asked.ids)
        left = 8 - len(asked.ids)
        room = min(left, self.talk.config.sampling.max_response_tokens - start)
        count = self.chance.randint(1, room)
        ids = np.array(self.chance.choices(range(20), k=count), "i4")
        numbers = list(range(self.sampled + 1, self.sampled + 1 + count))
        self.sampled += count
        ends = "stop" if count == room or self.chance.random() < 0.4 else ""
        logprobs = (-SCALE * np.array(numbers)).astype("f4")
        self.worker.report([chunk(lease_id, start, Version(0, self.step), [ids, logprobs], ends)])
        asked.ids += ids.tolist()
        asked.numbers += numbers
        if ends:
            asked.complete = True
            del self.leases[lease_id]
        elif self.chance.random() < 0.3:
            self.worker.give_back(grant, start + count, self.chance.choice(["leave", "abort"]))
            del self.leases[lease_id]

    def close(self):
        player = self.a_player()
        if not any(other.complete and other.requested for other in player.turns):
            return
        known = {other for asked in player.turns if asked.requested for other in lineage(asked)}
        fates = {other: "trained" if other in known else "superseded" for other in player.turns}
        behind, lease_id = player.session.superseded_forks(), player.lease.lease_id
        fates |= {other: "unread" for other in player.turns if not other.complete}
        scored = wire.Scored(lease_id, [self.chance.random()], [{}], behind)
        self.end(player, fates, self.chance.choice([scored, wire.Closed(lease_id, behind)]))

    def fail(self):
        player = self.a_player()
        if self.chance.random() < 0.05 and player.turns:
            closing = wire.GiveBack(player.lease.lease_id, 0, "agent_failed")
            self.end(player, dict.fromkeys(player.turns, "agent_failed"), closing)

    def end(self, player, fates, closing):
        for asked, fate in fates.items():
            if not player.lease.evaluation:
                self.fates |= dict.fromkeys(asked.numbers, (fate, player.lease.group, player.lease.index))
        self.leases = {number: granted for number, granted in self.leases.items() if granted[1] not in player.turns}
        del self.players[player.lease.group, player.lease.index]
        self.agents.report(closings=[closing])
        assert closing.lease_id in self.agents.answers("done")

    def kill_agents(self):
        if self.chance.random() < 0.2:
            self.processes += 1
            self.agents = FakeAgents(self.talk, "a0", f"agents-{self.processes}")
            self.agents.join(12)

    def kill_broker(self):
        if self.chance.random() < 0.05:
            self.talk.restart_broker()
            sessions = [player.lease.lease_id for player in self.players.values()]
            self.join(list(self.leases), sessions)

    def learn(self):
        step = self.talk.ledger.steps.consumed
        if found := self.learner.fetch(step):
            batch, arrays = found
            rest = iter(arrays)
            for group in batch.groups:
                next(rest)
                for head in group.samples:
                    ids, logprobs = next(rest), next(rest)
                    self.take(group.group, head, ids, logprobs)
            self.learner.consume(step)
            self.step = step + 1
            self.worker.hold(self.step, 1000)

    def take(self, group, head, ids, logprobs):
        assert len(ids) == len(logprobs) == head.response_tokens
        trained = {index for start, end, _ in head.segments for index in range(start, end)}
        assert all(logprobs[index] == 0 for index in range(len(ids)) if index not in trained)
        steps = [version.step for _, _, version in head.segments]
        assert steps == sorted(steps) and trained
        numbers = [round(-logprobs[index] / SCALE) for index in sorted(trained)]
        self.trained.setdefault((group, head.index), []).extend(numbers)
        self.counts["rows"] += 1
        self.counts["forks"] += head.fork > 0

    def check(self):
        ledger = self.talk.ledger
        assert ledger.account.closed
        expected = Counter(fate for fate, *_ in self.fates.values() if fate != "trained")
        assert Counter({name: n for name, n in ledger.account.discarded.items() if n}) == expected


def lineage(asked):
    while asked:
        yield asked
        asked = asked.parent


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full), pytest.param(2, marks=pytest.mark.full)])
def test_whatever_agents_do_to_their_histories_each_sampled_token_is_trained_exactly_once(
    seed, config_file, policy_folder
):
    play(World(seed, configuration.load(config_file, OVERRIDES), Tokenizer(policy_folder)))


@pytest.mark.full
@pytest.mark.parametrize("seed", [0, 1])
def test_template_histories_share_equal_prefixes_and_each_token_is_trained_exactly_once(
    seed, config_file, policy_folder
):
    play(World(seed, configuration.load(config_file, OVERRIDES), Tokenizer(policy_folder), by_tokens=True))


def play(world):
    happenings = [world.ask_first, world.continue_answer, world.continue_answer, world.rewrite, world.tools,
                  world.ask_the_same, world.retry,
                  world.hang_up, world.replay, world.generate, world.generate, world.generate, world.close, world.fail,
                  world.kill_agents, world.kill_broker, world.learn]  # fmt: skip
    for _ in range(800):
        world.listen()
        world.chance.choice(happenings if world.players else [world.generate, world.learn])()
        world.check()
    outcomes = {fate for fate, *_ in world.fates.values()}
    assert outcomes == {"trained", "superseded", "unread", "agent_failed"} and world.counts["forks"] > 3
    for session, numbers in world.trained.items():
        wanted = [name for name, (fate, *of) in world.fates.items() if fate == "trained" and tuple(of) == session]
        assert sorted(numbers) == sorted(wanted), "each token that the agent knows is in one row, and in no other"
