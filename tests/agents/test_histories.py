"""Histories of agents as they come, against a model: what was said keeps its tokens, and each of them has one place.

An agents process's sessions speak with a broker as it is. Chance has the agents go on, rewrite what was said, fork, ask
the same twice, at once or again, and go away; it has the worker stop in the midst of a turn, and kills processes.
"""

import random
from collections import Counter
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest

from april import config as configuration
from april import wire
from april.agents.link import read
from april.agents.rendering import Renderer
from april.agents.session import AgentSession, Refusal, Wish
from april.broker.desks.grants import sample_seed
from april.data.tokenizer import Tokenizer
from april.wire.rows import observation_row
from april.wire.version import Version
from tests.broker.conversation import Conversation, FakeAgents, FakeLearner, FakeWorker, chunk

PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"
OVERRIDES = ["--evaluation.prompts", "1", "--agent.command", '["true"]', "--sampling.max_response_tokens", "64",
             "--broker.attempts", "1000", "--schedule.rollout_batch_size", "2", "--schedule.n_samples_per_prompt", "2",
             "--schedule.over_sampling_batch_size", "3", "--schedule.max_steps", "40"]  # fmt: skip
SCALE = 1 / 1024
"""the log-probability of the i-th token that is sampled is -i times this: so each can be told from all others"""


@dataclass(eq=False)
class Asked:
    """What the model knows of a turn."""

    wish: Wish
    may_follow: set[tuple[int, ...]]
    """the ids that the policy may read before it"""
    turn: object
    parent: "Asked | None"
    ids: list[int] = field(default_factory=list)
    names: list[int] = field(default_factory=list)
    """of its tokens: each is sampled once"""
    read: tuple[int, ...] = ()
    over: bool = False
    asked: bool = True
    """by the last execution"""
    remembered: bool = True
    """the agents process knows its messages"""


@dataclass(eq=False)
class Player:
    """The agent of one sample."""

    told: wire.Session
    session: AgentSession
    turns: list[Asked] = field(default_factory=list)


class World:
    def __init__(self, seed, config, tokenizer, rendered=False):
        """`rendered`: histories are rendered anew with each request."""
        self.rendered = rendered
        self.chance = random.Random(seed)
        self.tokenizer = tokenizer
        self.renderer = Renderer(tokenizer, PLAIN, {}, {})
        self.talk = Conversation(config)
        self.processes, self.sampled, self.step = 0, 0, 0
        self.players, self.leases = {}, {}
        self.fates, self.trained, self.counts = {}, {}, Counter()
        """what the model says of each token of a training sample, and what the learner got of each session"""
        self.join()

    def join(self, worker=(), agents=()):
        self.worker, self.learner = FakeWorker(self.talk), FakeLearner(self.talk, "learner")
        self.learner.hello()
        if not self.talk.ledger.learner_uid:
            self.learner.say(wire.LearnerStart(0, "tcp://weights"))
        self.worker.join(self.step, 1000, worker)
        self.agents = FakeAgents(self.talk, "a0", f"agents-{self.processes}")
        self.agents.join(12, agents)

    # --- between the two ---

    def say(self, lease_id, start, tokens, request, parent):
        payload = tokens.tobytes() + msgspec.msgpack.encode(request)
        row = observation_row(lease_id, start, len(tokens), "", payload, parent=parent)
        self.agents.report([(row, payload)])
        assert self.agents.told("lengths") == [(lease_id, start + len(tokens))]

    def listen(self):
        for received in self.agents.take(wire.Sessions):
            [told] = received.message.sessions
            said = list(read(*(packed.data for packed in received.packed)))
            player = self.players.get((told.group, told.index))
            if player is None or player.told.lease_id != told.lease_id:
                session = AgentSession(told, self.renderer, self.say, None, self.rendered)
                player = self.players[told.group, told.index] = Player(told, session, player.turns if player else [])
                session.hear(said)
                self.meet_again(player)
            else:
                player.session.hear(said)
        for received in self.agents.take(wire.Turns):
            for row, payload in read(*(packed.data for packed in received.packed)):
                for player in self.players.values():
                    if player.told.lease_id == wire.session_of(row.lease_id):
                        player.session.hear([(row, payload)])
        for player in self.players.values():
            for asked in player.turns:
                if asked.over and asked.turn.calls:
                    asked.turn.calls, asked.turn.delivered = 0, True

    def meet_again(self, player):
        """What an agents process is told of a session is what the one before it knew."""
        turns = {(turn.branch, turn.place): turn for turn in player.session.turns}
        assert len(turns) == len(player.turns)
        for asked in player.turns:
            again = turns[asked.turn.branch, asked.turn.place]
            assert (again.ids, again.start, again.over) == (asked.ids, asked.turn.start, asked.over)
            asked.turn, asked.asked, asked.remembered = again, False, False

    # --- what agents do ---

    def text(self):
        return "".join(self.chance.choices("0123456789+*", k=self.chance.randint(1, 3)))

    def said_by(self, asked):
        return [*asked.wish.messages, {"role": "assistant", "content": self.said(asked.ids)}]

    def said(self, ids):
        ends = ids[-1] in self.tokenizer.eos_token_ids
        return self.tokenizer.decode(ids[:-1] if ends else ids)

    def a_player(self):
        return self.chance.choice(list(self.players.values()))

    def an_answer(self, player):
        return self.chance.choice([asked for asked in player.turns if asked.over and asked.asked] or [None])

    def ask(self, player, messages, again=None, repeated=False):
        """`again`: the turns one of which has to answer."""
        wish = Wish(messages, None, 8, (), repeated)
        same = [one for one in player.turns if one.wish.messages == messages]
        lost = [one for one in same if one.asked and one.turn.is_lost]
        again = again or lost[:1] or [one for one in same if not one.asked][:1]
        candidates, may_follow = self.model(player, messages)
        try:
            turn = player.session.ask(wish)
        except Refusal as error:
            assert error.code == "context_length_exceeded" and not again
            return
        turn.calls += 1
        if again:
            [found] = [one for one in again if one.turn is turn]
            found.asked = found.remembered = True
            return
        assert all(one.turn is not turn for one in player.turns)
        before = (turn.branch, player.session.branches[turn.branch].parent)
        parents = [one for one in candidates if one.turn.branch in before]
        player.turns.append(Asked(wish, may_follow, turn, next(iter(parents), None)))

    def model(self, player, messages):
        """(turns that a request may go on from, what the policy reads then): the longest history that it repeats."""
        if self.rendered:
            return self.model_of_rendered(player, self.encode(messages))
        known = [one for one in player.turns if one.over and one.remembered]
        fits = [one for one in known if messages[: len(one.wish.messages) + 1] == self.said_by(one) != messages]
        longest = max((len(one.wish.messages) for one in fits), default=-1)
        fits = [one for one in fits if len(one.wish.messages) == longest]
        new = self.encode(messages[longest + 1 :] if fits else messages)
        return fits, {(*one.read, *one.ids, *new) for one in fits} or {new}

    def model_of_rendered(self, player, ids):
        """The policy reads what the template makes of the request, and nothing else."""
        said = {one: (*one.read, *one.ids) for one in player.turns if one.over}
        fits = [one for one, before in said.items() if before == ids[: len(before)] != ids]
        longest = max((len(said[one]) for one in fits), default=0)
        return [one for one in fits if len(said[one]) == longest], {ids}

    def encode(self, messages):
        return tuple(self.tokenizer.encode_prompt("".join(one["content"] for one in messages)).tolist())

    def begin(self):
        self.ask(self.a_player(), [{"role": "user", "content": self.text()}])

    def go_on(self):
        player = self.a_player()
        if answer := self.an_answer(player):
            self.ask(player, [*self.said_by(answer), {"role": "user", "content": self.text()}])

    def rewrite(self):
        player = self.a_player()
        if answer := self.an_answer(player):
            messages = [*self.said_by(answer), {"role": "user", "content": self.text()}]
            place = self.chance.randrange(len(messages) - 1)
            messages[place] = messages[place] | {"content": messages[place]["content"] + "="}
            self.ask(player, messages)

    def tools(self):
        """The same results in another order are another history."""
        player = self.a_player()
        if answer := self.an_answer(player):
            results = [{"role": "tool", "content": self.text(), "tool_call_id": str(number)} for number in range(2)]
            for order in (results, results[::-1]):
                self.ask(player, [*self.said_by(answer), *order])

    def ask_the_same(self):
        """On purpose: whoever asked first is still there, or has its answer."""
        player = self.a_player()
        asked = self.chance.choice([one for one in player.turns if one.asked] or [None])
        if asked:
            self.ask(player, asked.wish.messages)

    def retry(self):
        player = self.a_player()
        asked = self.chance.choice([one for one in player.turns if one.asked] or [None])
        if asked:
            same = [one for one in player.turns if one.wish.messages == asked.wish.messages and one.asked]
            self.ask(player, asked.wish.messages, same, repeated=True)

    def hang_up(self):
        player = self.a_player()
        waited_for = [one for one in player.turns if one.turn.calls]
        if waited_for:
            self.chance.choice(waited_for).turn.calls = 0

    def replay(self):
        """An agent that is run again asks what it asked before."""
        player = self.a_player()
        before = next((one for one in player.turns if not one.asked), None)
        if before:
            self.ask(player, before.wish.messages)

    # --- what happens to them ---

    def generate(self):
        for grant in self.worker.grants():
            if grant.scoring:
                self.worker.score(grant, self.chance.random())
                continue
            if grant.lease_id not in self.talk.ledger.leases:
                continue  # its session was closed before it arrived
            player = self.players[grant.group, grant.index]
            seeds = {sample_seed(self.talk.config.seed, grant.group, grant.index, n): n for n in range(wire.BRANCHES)}
            [asked] = [one for one in player.turns if one.turn.branch == seeds[grant.seed] and not one.over]
            read = tuple(grant.arrays[1].tolist())
            read, so_far = read[: len(read) - len(asked.ids)], read[len(read) - len(asked.ids) :]
            assert list(so_far) == asked.ids
            assert read in asked.may_follow, "what was said is read in the tokens that it was said in"
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
        names = list(range(self.sampled + 1, self.sampled + 1 + count))
        self.sampled += count
        ends = "stop" if count == room or self.chance.random() < 0.4 else ""
        logprobs = (-SCALE * np.array(names)).astype("f4")
        self.worker.report([chunk(lease_id, start, Version(0, self.step), [ids, logprobs], ends)])
        asked.ids += ids.tolist()
        asked.names += names
        if ends:
            asked.over = True
            del self.leases[lease_id]
        elif self.chance.random() < 0.3:
            self.worker.give_back(grant, start + count, self.chance.choice(["leave", "abort"]))
            del self.leases[lease_id]

    def close(self):
        player = self.a_player()
        if not any(one.over and one.asked for one in player.turns):
            return
        known = {one for asked in player.turns if asked.asked for one in lineage(asked)}
        fates = {one: "trained" if one in known else "superseded" for one in player.turns}
        behind, lease_id = player.session.superseded(), player.told.lease_id
        fates |= {one: "unread" for one in player.turns if not one.over}
        scored = wire.Scored(lease_id, [self.chance.random()], [{}], behind)
        self.end(player, fates, self.chance.choice([scored, wire.Closed(lease_id, behind)]))

    def fail(self):
        player = self.a_player()
        if self.chance.random() < 0.05 and player.turns:
            closing = wire.GiveBack(player.told.lease_id, 0, "agent_failed")
            self.end(player, dict.fromkeys(player.turns, "agent_failed"), closing)

    def end(self, player, fates, closing):
        for asked, fate in fates.items():
            if not player.told.evaluation:
                self.fates |= dict.fromkeys(asked.names, (fate, player.told.group, player.told.index))
        self.leases = {number: held for number, held in self.leases.items() if held[1] not in player.turns}
        del self.players[player.told.group, player.told.index]
        self.agents.report(closings=[closing])
        assert closing.lease_id in self.agents.told("done")

    def kill_agents(self):
        if self.chance.random() < 0.2:
            self.processes += 1
            self.agents = FakeAgents(self.talk, "a0", f"agents-{self.processes}")
            self.agents.join(12)

    def kill_broker(self):
        if self.chance.random() < 0.05:
            self.talk.restart_broker()
            sessions = [player.told.lease_id for player in self.players.values()]
            self.join(list(self.leases), sessions)

    def learn(self):
        step = self.talk.ledger.consumed
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
        trained = {place for start, end, _ in head.segments for place in range(start, end)}
        assert all(logprobs[place] == 0 for place in range(len(ids)) if place not in trained)
        steps = [version.step for _, _, version in head.segments]
        assert steps == sorted(steps) and trained
        names = [round(-logprobs[place] / SCALE) for place in sorted(trained)]
        self.trained.setdefault((group, head.index), []).extend(names)
        self.counts["rows"] += 1
        self.counts["branches"] += head.branch > 0

    def check(self):
        ledger = self.talk.ledger
        assert ledger.closed
        expected = Counter(fate for fate, *_ in self.fates.values() if fate != "trained")
        assert Counter({name: n for name, n in ledger.discarded.items() if n}) == expected


def lineage(asked):
    while asked:
        yield asked
        asked = asked.parent


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full), pytest.param(2, marks=pytest.mark.full)])
def test_whatever_agents_do_to_their_histories_each_token_is_said_once_and_is_in_one_place(
    seed, config_file, policy_folder
):
    play(World(seed, configuration.load(config_file, OVERRIDES), Tokenizer(policy_folder)))


@pytest.mark.full
@pytest.mark.parametrize("seed", [0, 1])
def test_histories_that_are_rendered_anew_share_what_has_the_same_tokens_and_each_is_in_one_place(
    seed, config_file, policy_folder
):
    play(World(seed, configuration.load(config_file, OVERRIDES), Tokenizer(policy_folder), rendered=True))


def play(world):
    happenings = [world.begin, world.go_on, world.go_on, world.rewrite, world.tools, world.ask_the_same, world.retry,
                  world.hang_up, world.replay, world.generate, world.generate, world.generate, world.close, world.fail,
                  world.kill_agents, world.kill_broker, world.learn]  # fmt: skip
    for _ in range(800):
        world.listen()
        world.chance.choice(happenings if world.players else [world.generate, world.learn])()
        world.check()
    told = {fate for fate, *_ in world.fates.values()}
    assert told == {"trained", "superseded", "unread", "agent_failed"} and world.counts["branches"] > 3
    for session, names in world.trained.items():
        wanted = [name for name, (fate, *of) in world.fates.items() if fate == "trained" and tuple(of) == session]
        assert sorted(names) == sorted(wanted), "each token that the agent knows is in one row, and in no other"
