"""A broker without sockets whose run fills journal files, with a worker and a learner."""

from tests.support.broker_conversation import Conversation, FakeLearner, FakeWorker, make_batch

SETTINGS = ["--broker.journal_file_records", "100", "--over-sampling-batch-size", "4", "--schedule.max_steps", "1000"]
STEPS_PER_FILE = 4
"""Training steps whose records fill more than one journal file."""


class Run(Conversation):
    def __init__(self, config):
        super().__init__(config)
        self.join(step=0)

    def join(self, step):
        self.worker, self.learner = FakeWorker(self), FakeLearner(self)
        self.worker.join(step)
        self.learner.join(step)

    def train(self, segments):
        """Train as many steps, each with a durable checkpoint, as fill `segments` journal files; the broker takes its
        snapshots meanwhile."""
        for _ in range(segments * STEPS_PER_FILE):
            make_batch(self.worker)
            step = self.ledger.steps.consumed
            assert self.learner.fetch(step)
            self.learner.consume(step)
            self.learner.durable(step + 1)
            self.worker.hold(step + 1)
            self.take_snapshot()
            assert self.journal.bytes_on_disk == sum(path.stat().st_size for path in self.segments())

    def segments(self):
        return sorted(self.journal.folder.glob("*.msgpack"))

    def snapshots(self):
        return self.service.snapshots.store.positions()
