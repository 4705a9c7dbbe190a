"""A real worker with the embedded engine and an in-process broker, in one thread, so that either can die at any point.

Verifiers and environments answer in this process, an environment a few passes after the call.
"""

from itertools import count

from april import config as configuration
from april import wire
from april.simulate.probe import load_folder_weights
from april.wire.message import Version
from april.workers.engines.embedded.engine import TorchEngine
from april.workers.environments.process import answer_call
from april.workers.rewards.process import verify
from april.workers.worker import Worker
from tests.support.broker_conversation import Conversation, Peer

UIDS = count()
POLLS = 3
"""Number of polls until an environment answers."""
MAX_PASSES = 2000


class SlowEnvironment:
    """Stand-in for the pool of environment processes; answers after POLLS polls."""

    def __init__(self, processes, rules):
        self.rules, self.waiting, self.asked = rules, [], []

    @property
    def pending(self):
        return len(self.waiting)

    def submit(self, call):
        self.asked.append(call)
        self.waiting.append((POLLS, call))

    def poll(self):
        due = [call for polls, call in self.waiting if polls == 0]
        self.waiting = [(polls - 1, call) for polls, call in self.waiting if polls]
        return [answer_call(self.rules.name, call) for call in due]

    def close(self):
        self.waiting.clear()


class InstantRewards:
    def __init__(self, processes, rules, output_file=None):
        self.rules, self.scores = rules, []

    @property
    def pending(self):
        return len(self.scores)

    def put(self, *items):
        self.scores += verify(list(items), self.rules)

    def poll(self):
        scores, self.scores = self.scores, []
        return scores

    def close(self):
        pass


class WorkerConnection(Peer):
    """A worker's connection to the in-process broker of a conversation."""

    is_silent = False

    def __init__(self, conversation, uid):
        super().__init__(conversation, "worker", "w0", uid)

    def send(self, message, arrays=()):
        self.say(message, arrays)

    def receive(self, timeout_ms=0):
        received, self.inbox = self.inbox, []
        return received

    def is_disowned(self, received):
        return isinstance(received.message, wire.Refused) and "unknown session" in received.message.reason

    def hello(self, lease_ids, acknowledged_tokens=0):
        self.session = 0
        self.conversation.peers[b"w0"] = self
        return super().hello(lease_ids)

    def check_alive(self):
        pass

    def hold(self, leases, emitted_tokens=0):
        self.say(wire.Heartbeat(list(leases), emitted_tokens), connection=b"control")

    def occupy(self, slots):
        pass

    def forget(self):
        self.session = 0

    def goodbye(self):
        self.say(wire.Goodbye())


class BrokerAndWorker:
    """An in-process broker with one worker at a time."""

    def __init__(self, config_file, monkeypatch, overrides=()):
        monkeypatch.setattr("april.workers.environments.turns.EnvironmentPool", SlowEnvironment)
        monkeypatch.setattr("april.workers.scoring.RewardPool", InstantRewards)
        self.config = configuration.load(config_file, overrides)
        self.talk = Conversation(self.config)
        self.weights = load_folder_weights(self.config.model.path)
        self.worker = None

    @property
    def ledger(self):
        return self.talk.ledger

    def start_worker(self, capacity=64, chunk_tokens=1, step=0):
        path = self.config.model.path
        engine = TorchEngine(path, capacity, chunk_tokens=chunk_tokens, report_s=1000.0)
        engine.load_weights(Version(0, step), self.weights)
        self.worker = Worker(self.config, engine, WorkerConnection(self.talk, f"uid-{next(UIDS)}"), [])
        self.worker._say_hello()

    def kill_worker(self):
        """Drop the worker without a goodbye: unsent tokens are lost, and the next worker continues from the journal."""
        self.worker = None

    def kill_broker(self):
        self.talk.restart_broker()
        self.talk.peers[b"w0"] = self.worker.connection
        self.worker._say_hello()

    def run_pass(self):
        self.worker.run_once()
        self.talk.tick(0.001)

    def until(self, condition):
        for _ in range(MAX_PASSES):
            if condition():
                return
            self.run_pass()
        raise AssertionError(f"the condition did not hold within {MAX_PASSES} passes")

    def group(self, number=0):
        return self.ledger.groups[number]

    def facts(self, sample):
        """Tokens, log-probabilities, observations, reward and state of a complete sample, without the versions that
        sampled it."""
        ids, logprobs = (packed.data for packed in self.talk.service.payloads.response(sample.chunk_refs))
        return {
            "ids": list(memoryview(ids).cast("i")),
            "logprobs": [round(value, 3) for value in memoryview(logprobs).cast("f")],
            "observations": sample.observations,
            "finish_reason": sample.finish_reason,
            "reward": sample.reward,
            "state": self.talk.service.payloads.environment_state(sample),
        }
