"""What an agents process does with its sessions, whatever becomes of their programs."""

import asyncio
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from msgspec.structs import replace

from april import wire
from april.agents import programs
from april.agents.agents import MAX_DEATHS, Agents
from april.agents.dialects.chat import Chat
from april.agents.gateway import Gateway
from april.agents.host import Host, ProgramEnded, StartProgram, pack_state
from april.agents.listening import Addresses
from april.agents.programs import CommandRunner, NotStarted, ProgramRunner
from april.agents.rendering import Renderer
from april.config import ConfigError
from april.config.workers import AgentSection
from april.data.tokenizer import Tokenizer
from april.launch.check import check_agent
from april.util.lifetime import environment_of

SESSION = wire.MAX_FORKS
TELL_AND_EXIT = 'echo "$OPENAI_BASE_URL $APRIL_PUBLIC_URL $APRIL_TASK"; exit $(echo $APRIL_TASK | tr -dc 0-9)'
LEASE = wire.AgentSession(SESSION, 3, 1, False, '"12*3="', "63", 64, 1.0)


class Runner:
    def __init__(self):
        self.started, self.cancelled = [], []

    def start_program(self, order):
        self.started.append(order)

    def cancel(self, key):
        self.cancelled.append(key)


@pytest.fixture
def agents(policy_folder):
    tokenizer = Tokenizer(policy_folder)
    agents = Agents(AgentSection(attach=True, timeout_s=0.05), Gateway([Chat(tokenizer, "run", False)]),
                    Renderer(tokenizer, "", {}, {}))  # fmt: skip
    agents.addresses = Addresses(*3 * ["http://127.0.0.1:1/v1"])
    agents.runner, closings, leave_reasons = Runner(), [], []
    agents.link = SimpleNamespace(
        send_observation=None,
        close_session=closings.append,
        leave=leave_reasons.append,
        closings=closings,
        leave_reasons=leave_reasons,
    )
    return agents


def test_a_program_lost_with_its_process_is_rerun_under_a_new_key_until_it_makes_no_progress(agents):
    agents.open_session(LEASE, [])
    for _ in range(MAX_DEATHS):
        agents.process_died([SESSION], "killed")
    keys = [order.api_key for order in agents.runner.started]
    assert len(set(keys)) == 1 + MAX_DEATHS and list(agents.gateway.sessions) == keys[-1:]
    assert agents.link.closings == []
    agents.process_died([SESSION], "killed")
    assert agents.link.closings == [wire.GiveBack(SESSION, 0, "agent_failed", "killed")] and not agents.sessions


def test_with_replay_discard_a_program_that_has_made_a_call_is_not_rerun(agents):
    agents.section = AgentSection(attach=True, replay="discard")
    agents.open_session(LEASE, [])
    agents.process_died([SESSION], "killed")
    assert len(agents.runner.started) == 2, "it had asked nothing"
    request = wire.TurnRequest(b"key", 8)
    agents.sessions[SESSION]._add(agents.sessions[SESSION].forks[0], request, 3, np.zeros(3, np.int32))
    agents.process_died([SESSION], "killed")
    assert len(agents.runner.started) == 2 and agents.link.closings == [wire.GiveBack(SESSION, 0, "leave")]
    assert not agents.sessions and not agents.gateway.sessions


@pytest.mark.parametrize("replay", ["answer", "discard"])
def test_a_closed_session_that_the_broker_sends_again_is_not_run_again(agents, replay):
    agents.section = AgentSection(attach=True, replay=replay)
    agents.open_session(LEASE, [])
    agents.program_ended(SESSION, 1.0, "")
    agents.open_session(LEASE, [])
    assert len(agents.runner.started) == 1 and not agents.sessions


@pytest.mark.full
@pytest.mark.parametrize(
    "reward, posted, closing",
    [
        (0.5, None, wire.Scored(SESSION, [0.5], [{}])),
        (None, 0.25, wire.Scored(SESSION, [0.25], [{}])),
        (0.0, 0.25, wire.Scored(SESSION, [0.0], [{}])),
        (None, None, wire.Closed(SESSION)),
    ],
)
def test_the_reward_is_the_program_s_or_the_posted_one_or_the_verifier_s(agents, reward, posted, closing):
    agents.open_session(LEASE, [])
    agents.sessions[SESSION].reward = posted
    agents.program_ended(SESSION, reward, "")
    assert agents.link.closings == [closing] and not agents.gateway.sessions


def test_an_agent_says_what_was_correct_beside_its_reward(agents):
    for lease_id, posted, returned in ((SESSION, 0.25, None), (2 * SESSION, None, 0.5)):
        agents.open_session(replace(LEASE, lease_id=lease_id), [])
        agents.sessions[lease_id].reward, agents.sessions[lease_id].details = posted, {"correct": 0.0}
        agents.program_ended(lease_id, returned, "", details=returned and {"correct": 1.0})
    scored = [(closing.rewards, closing.details) for closing in agents.link.closings]
    assert scored == [([0.25], [{"correct": 0.0}]), ([0.5], [{"correct": 1.0}])]


def test_details_of_a_program_s_reward_are_numbers_by_name():
    host = Host(None, 1)
    assert host._outcome(1, (1, {"correct": True}), b"") == ProgramEnded(1, 1.0, details={"correct": 1.0})
    for wrong in ((1.0, {"correct": "yes"}), (1.0, {1: 2.0}), (1.0, None), (1.0, {"a": float("nan")})):
        assert "numbers by name" in host._outcome(1, wrong, b"").error


def test_a_failed_program_starts_from_nothing_and_a_late_outcome_is_ignored(agents):
    agents.open_session(LEASE, [])
    agents.program_ended(SESSION, None, "ValueError: no\nTraceback ...")
    agents.program_ended(SESSION, 1.0, "")
    assert agents.link.closings == [wire.GiveBack(SESSION, 0, "agent_failed", "ValueError: no")]


def test_a_session_that_takes_too_long_is_ended_with_its_program(agents):
    async def wait():
        agents.open_session(LEASE, [])
        agents.program_started(SESSION)
        await asyncio.sleep(0.2)

    asyncio.run(wait())
    assert agents.runner.cancelled == [SESSION] and "agent.timeout_s = 0.05" in agents.link.closings[0].error


def test_without_a_host_process_all_sessions_are_given_back(agents):
    agents.open_session(LEASE, [])
    agents.runner_failed("it does not start")
    assert agents.link.leave_reasons == [agents.failure] and "it does not start" in agents.failure


class ProgramObserver:
    def __init__(self):
        self.outcomes, self.changed = [], asyncio.Event()

    def program_started(self, key):
        pass

    def program_ended(self, key, reward, error, state=b"", details=None):
        self.outcomes.append(ProgramEnded(key, reward, error, state, details or {}))
        self.changed.set()

    def process_died(self, keys, why):
        self.outcomes.append((keys, why))
        self.changed.set()

    def runner_failed(self, why):
        raise AssertionError(why)

    async def next_event(self):
        async with asyncio.timeout(60):
            await self.changed.wait()
        self.changed.clear()
        return self.outcomes.pop(0)


def order(key, task=None):
    return StartProgram(key, "http://127.0.0.1:1/v1", "key", task or {}, False, "https://here:1/v1")


@pytest.mark.full
def test_functions_run_in_a_process_that_is_replaced_when_it_dies():
    async def play():
        observer = ProgramObserver()
        runner = ProgramRunner("tests.support.agent_programs:as_told", {}, 4, observer)
        await runner.start()
        runner.start_program(order(1, {"returns": 0.5}))
        returned = await observer.next_event()
        runner.start_program(order(2, {"raises": "no"}))
        raised = await observer.next_event()
        runner.start_program(order(3, {"returns": "much"}))
        nonsense = await observer.next_event()
        runner.start_program(order(6, {"returns": float("nan")}))
        no_number = await observer.next_event()
        runner.start_program(order(4, {"exits": 1}))
        died = await observer.next_event()
        runner.start_program(order(5, {"returns": None, "leaves": {"tests": 3}}))
        again = await observer.next_event()
        await runner.close()
        return returned, raised, nonsense, no_number, died, again

    returned, raised, nonsense, no_number, died, again = asyncio.run(play())
    assert (returned.key, returned.reward, again) == (1, 0.5, ProgramEnded(5, state=pack_state({"tests": 3})))
    assert raised.error.startswith("ValueError: no\n") and "neither a finite number" in nonsense.error
    assert "it returned nan, which is neither a finite number" in no_number.error
    assert died[0] == [4] and "status" in died[1]


def test_programs_that_start_while_their_process_is_replaced_run_in_the_next_one():
    """Whenever that is: one starts in every millisecond from the kill until the next process has run one."""

    async def play():
        observer, keys, ended = ProgramObserver(), [], []
        runner = ProgramRunner("tests.support.agent_programs:as_told", {}, 4, observer)
        await runner.start()
        os.kill(runner.process.pid, signal.SIGKILL)
        async with asyncio.timeout(60):
            while not ended or len(ended) < len(keys):
                if not ended:
                    keys.append(len(keys) + 1)
                    runner.start_program(order(keys[-1], {"returns": 1.0}))
                await asyncio.sleep(0.001)
                outcomes, observer.outcomes = observer.outcomes, []
                ended += [outcome.key for outcome in outcomes if isinstance(outcome, ProgramEnded)]
                for lost in (key for died in outcomes if isinstance(died, tuple) for key in died[0]):
                    runner.start_program(order(lost, {"returns": 1.0}))
        await runner.close()
        return sorted(ended), keys

    ended, keys = asyncio.run(play())
    assert ended == keys


def test_of_programs_that_wait_for_a_process_a_cancelled_one_does_not_run():
    async def play():
        observer = ProgramObserver()
        runner = ProgramRunner("tests.support.agent_programs:as_told", {}, 4, observer)
        for key in (1, 2):
            runner.start_program(order(key, {"returns": 1.0}))
        runner.cancel(1)
        await runner.start()
        outcome = await observer.next_event()
        await runner.close()
        return outcome.key, observer.outcomes

    assert asyncio.run(play()) == (2, [])


def test_whatever_fails_in_a_runner_is_said_and_leaves_no_session_waiting(tmp_path):
    async def play():
        observer = ProgramObserver()
        observer.program_ended, failures = fail, []
        observer.runner_failed = failures.append
        runner = ProgramRunner("tests.support.agent_programs:as_told", {}, 4, observer)
        await runner.start()
        runner.start_program(order(1, {"returns": 1.0}))
        async with asyncio.timeout(60):
            while not failures:
                await asyncio.sleep(0.01)
        await runner.close()
        observer = ProgramObserver()
        runner = CommandRunner(["true"], tmp_path, observer)
        runner.start_program(order(2))
        return failures, await observer.next_event()

    [failure], ended = asyncio.run(play())
    assert "a fault" in failure and ended.key == 2 and "Is a directory" in ended.error


def fail(*_):
    raise ValueError("a fault")


@pytest.mark.parametrize(
    "command, timeout_s, said",
    [
        (["sh", "-c", "kill -9 $$"], 60, "ended at its start"),
        (["sleep", "100"], 0.3, "not ready after 0.3 s"),
        (["no-such-command"], 60, "cannot be started: No such file"),
    ],
    ids=["killed", "slow", "missing"],
)
def test_a_host_process_that_does_not_become_ready_is_said_not_to_have_started(monkeypatch, command, timeout_s, said):
    monkeypatch.setattr(programs, "python_command", lambda *words: command)
    monkeypatch.setattr(programs, "START_TIMEOUT_S", timeout_s)

    async def play():
        runner = ProgramRunner("unused", {"much": "x" * 100_000}, 4, ProgramObserver())
        try:
            await runner.start()
        finally:
            await runner.close()

    with pytest.raises(NotStarted, match=said):
        asyncio.run(play())


@pytest.mark.full
def test_outcomes_wait_for_a_busy_process_and_arrive_whole():
    """Together they are more than a socket holds."""
    keys = set(range(1, 41))

    async def play():
        observer = ProgramObserver()
        runner = ProgramRunner("tests.support.agent_programs:as_told", {}, 4, observer)
        await runner.start()
        for key in keys:
            runner.start_program(order(key, {"returns": 1.0, "leaves": "x" * 100_000}))
        await asyncio.sleep(0)
        time.sleep(1)
        async with asyncio.timeout(60):
            while len(observer.outcomes) < len(keys):
                await asyncio.sleep(0.01)
        await runner.close()
        return {outcome.key for outcome in observer.outcomes}

    assert asyncio.run(play()) == keys


async def pid_in(file):
    async with asyncio.timeout(60):
        while not (file.exists() and file.read_text().endswith("\n")):
            await asyncio.sleep(0.01)
    return int(file.read_text())


async def until_ended(pid):
    async with asyncio.timeout(60):
        while any(environment_of(Path(f"/proc/{pid}"))):
            await asyncio.sleep(0.01)


@pytest.mark.full
def test_a_plain_function_that_hangs_is_ended_with_its_process_and_all_it_has_started(monkeypatch, tmp_path):
    """A thread cannot be ended alone; others of the process are run again."""
    monkeypatch.setattr(programs, "GRACE_S", 0.1)

    async def play():
        observer, tools = ProgramObserver(), [tmp_path / "1", tmp_path / "2"]
        runner = ProgramRunner("tests.support.agent_programs:as_told", {}, 4, observer)
        await runner.start()
        for number, tool in enumerate(tools, 1):
            runner.start_program(order(number, {"hangs": str(tool)}))
        pids = [await pid_in(tool) for tool in tools]
        runner.cancel(1)
        outcomes = await observer.next_event()
        for pid in pids:
            await until_ended(pid)
        await runner.close()
        return outcomes, observer.outcomes

    (died, why), more = asyncio.run(play())
    assert died == [2] and "status -9" in why and more == []


@pytest.mark.full
def test_a_cancelled_command_is_killed_with_processes_that_left_its_process_group(tmp_path):
    async def play():
        observer, tool = ProgramObserver(), tmp_path / "tool"
        session = f"setsid sh -c 'echo $$ > {tool}; exec sleep 1000' & sleep 1000"
        runner = CommandRunner(["sh", "-c", session], tmp_path / "programs.log", observer)
        await runner.start()
        runner.start_program(order(1))
        pid = await pid_in(tool)
        runner.cancel(1)
        runner.start_program(order(2))
        runner.cancel(2)
        await until_ended(pid)
        await runner.close()
        return observer.outcomes

    assert asyncio.run(play()) == []


@pytest.mark.full
@pytest.mark.parametrize("times, ends", [(3, ProgramEnded(1, 1.5)), ("much", "TypeError: can only concatenate")])
def test_a_class_is_instantiated_once_and_its_error_is_raised_in_each_session(times, ends):
    async def play():
        observer = ProgramObserver()
        runner = ProgramRunner("tests.support.agent_programs:Made", {"times": times}, 4, observer)
        await runner.start()
        runner.start_program(order(1, {"returns": 0.5}))
        ended = await observer.next_event()
        await runner.close()
        return ended

    ended = asyncio.run(play())
    assert ended == ends or ended.error.startswith(ends)


def test_options_for_a_function_are_refused():
    agent = AgentSection(program="tests.support.agent_programs:as_told", options={"times": 3})
    with pytest.raises(ConfigError, match=r"'agent.options' = {'times': 3}"):
        check_agent(SimpleNamespace(agent=agent))


def test_a_command_is_a_process_for_each_session(tmp_path):
    async def play():
        observer, log = ProgramObserver(), tmp_path / "logs" / "programs.log"
        runner = CommandRunner(["sh", "-c", TELL_AND_EXIT], log, observer)
        await runner.start()
        runner.start_program(order(1, {"status": 0}))
        good = await observer.next_event()
        runner.start_program(order(2, {"status": 3}))
        bad = await observer.next_event()
        missing = CommandRunner(["no-such-command"], log, observer)
        missing.start_program(order(3))
        return good, bad, await observer.next_event(), log.read_text()

    good, bad, missing, log = asyncio.run(play())
    assert (
        good == ProgramEnded(1) and "status 3" in bad.error and "'no-such-command' cannot be started" in missing.error
    )
    assert 'http://127.0.0.1:1/v1 https://here:1/v1 {"status":0}' in log
