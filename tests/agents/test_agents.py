"""What an agents process does with its sessions, whatever becomes of their programs."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from april import wire
from april.agents import programs
from april.agents.agents import MOST_DEATHS, Agents
from april.agents.dialects import Chat
from april.agents.gateway import Gateway
from april.agents.host import Begin, Ended, packed
from april.agents.link import Link
from april.agents.listening import Addresses
from april.agents.programs import CommandRunner, ProgramRunner
from april.agents.rendering import Renderer
from april.config import ConfigError
from april.config.workers import AgentSection
from april.data.tokenizer import Tokenizer
from april.launch.check import check_agent
from april.processes.tree import environment_of

SESSION = wire.BRANCHES
TELL_AND_EXIT = 'echo "$OPENAI_BASE_URL $APRIL_PUBLIC_URL $APRIL_TASK"; exit $(echo $APRIL_TASK | tr -dc 0-9)'
TOLD = wire.Session(SESSION, 3, 1, False, '"12*3="', "63", 64, 1.0)


class Runner:
    def __init__(self):
        self.begun, self.ceased = [], []

    def begin(self, order):
        self.begun.append(order)

    def cease(self, key):
        self.ceased.append(key)


@pytest.fixture
def agents(policy_folder):
    tokenizer = Tokenizer(policy_folder)
    agents = Agents(AgentSection(attach=True, timeout_s=0.05), Gateway([Chat(tokenizer, "run", False)]),
                    Renderer(tokenizer, "", {}, {}))  # fmt: skip
    agents.addresses = Addresses(*3 * ["http://127.0.0.1:1/v1"])
    agents.runner, closings, left = Runner(), [], []
    agents.link = SimpleNamespace(
        say=None, close_session=closings.append, leave=left.append, closings=closings, left=left
    )
    return agents


def test_a_program_that_is_lost_with_its_process_is_run_again_under_a_new_key_until_that_brings_nothing(agents):
    agents.open(TOLD, [])
    for _ in range(MOST_DEATHS):
        agents.died([SESSION], "killed")
    keys = [order.api_key for order in agents.runner.begun]
    assert len(set(keys)) == 1 + MOST_DEATHS and list(agents.gateway.sessions) == keys[-1:]
    assert agents.link.closings == []
    agents.died([SESSION], "killed")
    assert agents.link.closings == [wire.GiveBack(SESSION, 0, "agent_failed", "killed")] and not agents.sessions


def test_a_program_that_has_asked_something_is_not_run_again_where_that_is_to_be_discarded(agents):
    agents.section = AgentSection(attach=True, replay="discard")
    agents.open(TOLD, [])
    agents.died([SESSION], "killed")
    assert len(agents.runner.begun) == 2, "it had asked nothing"
    request = wire.TurnRequest(b"key", 8)
    agents.sessions[SESSION]._add(agents.sessions[SESSION].branches[0], request, 3, np.zeros(3, np.int32))
    agents.died([SESSION], "killed")
    assert len(agents.runner.begun) == 2 and agents.link.closings == [wire.GiveBack(SESSION, 0, "leave")]
    assert not agents.sessions and not agents.gateway.sessions


@pytest.mark.parametrize(
    "reward, said, closing",
    [
        (0.5, None, wire.Scored(SESSION, [0.5], [{}])),
        (None, 0.25, wire.Scored(SESSION, [0.25], [{}])),
        (0.0, 0.25, wire.Scored(SESSION, [0.0], [{}])),
        (None, None, wire.Closed(SESSION)),
    ],
)
def test_the_reward_is_the_program_s_or_what_was_said_over_http_or_the_verifier_s(agents, reward, said, closing):
    agents.open(TOLD, [])
    agents.sessions[SESSION].reward = said
    agents.ended(SESSION, reward, "")
    assert agents.link.closings == [closing] and not agents.gateway.sessions


def test_a_failed_program_starts_from_nothing_and_a_late_word_of_it_counts_no_more(agents):
    agents.open(TOLD, [])
    agents.ended(SESSION, None, "ValueError: no\nTraceback ...")
    agents.ended(SESSION, 1.0, "")
    assert agents.link.closings == [wire.GiveBack(SESSION, 0, "agent_failed", "ValueError: no")]


def test_a_session_that_takes_too_long_is_ended_with_its_program(agents):
    async def wait():
        agents.open(TOLD, [])
        agents.began(SESSION)
        await asyncio.sleep(0.2)

    asyncio.run(wait())
    assert agents.runner.ceased == [SESSION] and "agent.timeout_s = 0.05" in agents.link.closings[0].error


def test_without_a_process_for_programs_all_sessions_go_elsewhere(agents):
    agents.open(TOLD, [])
    agents.broken("it does not start")
    assert agents.link.left == [agents.failure] and "it does not start" in agents.failure


def test_what_the_broker_tells_of_a_session_that_is_ending_starts_nothing(monkeypatch):
    link = Link.__new__(Link)
    link.leases, link.reports = {SESSION}, SimpleNamespace(is_closing=lambda lease_id: lease_id == SESSION)
    heard = []
    monkeypatch.setattr(Link, "_call", lambda self, function, *arguments: heard.append(arguments))
    link.listener = SimpleNamespace(open=None)
    empty = wire.Packed("u1", 0, b"")
    both = wire.Sessions([TOLD, wire.Session(SESSION + wire.BRANCHES, 3, 2, False, '""', "", 64, 1.0)])
    link._handle(wire.Received(both, [empty] * 4))
    assert [told.lease_id for told, _ in heard] == [SESSION + wire.BRANCHES]


class Audience:
    def __init__(self):
        self.heard, self.news = [], asyncio.Event()

    def began(self, key):
        pass

    def ended(self, key, reward, error, state=b""):
        self.heard.append(Ended(key, reward, error, state))
        self.news.set()

    def died(self, keys, why):
        self.heard.append((keys, why))
        self.news.set()

    def broken(self, why):
        raise AssertionError(why)

    async def next(self):
        async with asyncio.timeout(60):
            await self.news.wait()
        self.news.clear()
        return self.heard.pop(0)


def order(key, task=None):
    return Begin(key, "http://127.0.0.1:1/v1", "key", task or {}, False, "https://here:1/v1")


def test_functions_run_in_a_process_that_is_replaced_when_it_dies():
    async def play():
        audience = Audience()
        runner = ProgramRunner("tests.agents.program:as_told", {}, 4, audience)
        await runner.start()
        runner.begin(order(1, {"returns": 0.5}))
        returned = await audience.next()
        runner.begin(order(2, {"raises": "no"}))
        raised = await audience.next()
        runner.begin(order(3, {"returns": "much"}))
        nonsense = await audience.next()
        runner.begin(order(6, {"returns": float("nan")}))
        no_number = await audience.next()
        runner.begin(order(4, {"exits": 1}))
        died = await audience.next()
        runner.begin(order(5, {"returns": None, "leaves": {"tests": 3}}))
        again = await audience.next()
        await runner.close()
        return returned, raised, nonsense, no_number, died, again

    returned, raised, nonsense, no_number, died, again = asyncio.run(play())
    assert (returned.key, returned.reward, again) == (1, 0.5, Ended(5, state=packed({"tests": 3})))
    assert raised.error.startswith("ValueError: no\n") and "neither a finite number" in nonsense.error
    assert "it returned nan, which is neither a finite number" in no_number.error
    assert died[0] == [4] and "status" in died[1]


async def pid_in(file):
    async with asyncio.timeout(60):
        while not (file.exists() and file.read_text().endswith("\n")):
            await asyncio.sleep(0.01)
    return int(file.read_text())


async def until_ended(pid):
    async with asyncio.timeout(60):
        while any(environment_of(Path(f"/proc/{pid}"))):
            await asyncio.sleep(0.01)


def test_a_plain_function_that_hangs_is_ended_with_its_process_and_all_it_has_started(monkeypatch, tmp_path):
    """A thread cannot be ended alone; others of the process are run again."""
    monkeypatch.setattr(programs, "GRACE_S", 0.1)

    async def play():
        audience, tools = Audience(), [tmp_path / "1", tmp_path / "2"]
        runner = ProgramRunner("tests.agents.program:as_told", {}, 4, audience)
        await runner.start()
        for number, tool in enumerate(tools, 1):
            runner.begin(order(number, {"hangs": str(tool)}))
        pids = [await pid_in(tool) for tool in tools]
        runner.cease(1)
        heard = await audience.next()
        for pid in pids:
            await until_ended(pid)
        await runner.close()
        return heard, audience.heard

    (died, why), more = asyncio.run(play())
    assert died == [2] and "status -9" in why and more == []


@pytest.mark.full
def test_a_command_that_takes_too_long_is_ended_with_what_has_left_its_group(tmp_path):
    async def play():
        audience, tool = Audience(), tmp_path / "tool"
        told = f"setsid sh -c 'echo $$ > {tool}; exec sleep 1000' & sleep 1000"
        runner = CommandRunner(["sh", "-c", told], tmp_path / "programs.log", audience)
        await runner.start()
        runner.begin(order(1))
        pid = await pid_in(tool)
        runner.cease(1)
        runner.begin(order(2))
        runner.cease(2)
        await until_ended(pid)
        await runner.close()
        return audience.heard

    assert asyncio.run(play()) == []


@pytest.mark.parametrize("times, ends", [(3, Ended(1, 1.5)), ("much", "TypeError: can only concatenate")])
def test_a_class_is_made_once_of_its_options_and_what_it_raises_then_each_session_raises(times, ends):
    async def play():
        audience = Audience()
        runner = ProgramRunner("tests.agents.program:Made", {"times": times}, 4, audience)
        await runner.start()
        runner.begin(order(1, {"returns": 0.5}))
        ended = await audience.next()
        await runner.close()
        return ended

    ended = asyncio.run(play())
    assert ended == ends or ended.error.startswith(ends)


def test_options_for_a_function_are_refused():
    agent = AgentSection(program="tests.agents.program:as_told", options={"times": 3})
    with pytest.raises(ConfigError, match=r"'agent.options' = {'times': 3} is for a program that is a class"):
        check_agent(SimpleNamespace(agent=agent))


def test_a_command_is_a_process_for_each_session(tmp_path):
    async def play():
        audience, log = Audience(), tmp_path / "logs" / "programs.log"
        runner = CommandRunner(["sh", "-c", TELL_AND_EXIT], log, audience)
        await runner.start()
        runner.begin(order(1, {"status": 0}))
        good = await audience.next()
        runner.begin(order(2, {"status": 3}))
        bad = await audience.next()
        missing = CommandRunner(["no-such-command"], log, audience)
        missing.begin(order(3))
        return good, bad, await audience.next(), log.read_text()

    good, bad, missing, log = asyncio.run(play())
    assert good == Ended(1) and "status 3" in bad.error and "'no-such-command' cannot be started" in missing.error
    assert 'http://127.0.0.1:1/v1 https://here:1/v1 {"status":0}' in log
