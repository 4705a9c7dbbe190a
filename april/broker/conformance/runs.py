"""A fault-free run of a schedule, from its first group to its last batch, and two sources of empty prompts for it."""

from april.broker.ledger.admission import Verdict
from april.broker.ledger.ledger import Ledger
from april.broker.ledger.rules import Rules
from april.broker.plan import make_schedule
from april.broker.schedules.schedule import Schedule, choose_sample
from april.config import ScheduleSection
from april.wire.message import Version

# --- prompt sources ---------------------------------------------------------------------------------------------------


class NumberedPrompts:
    """A dataset of `rows` empty prompts, drawn for `epochs` epochs."""

    def __init__(self, rows: int, epochs: int):
        self.rows, self.epochs = rows, epochs

    def draw(self, cursor):
        epoch, row = cursor
        if row >= self.rows:
            epoch, row = epoch + 1, 0
        return None if epoch >= self.epochs else (epoch, row, b"")


class SubmittedPromptsStub:
    """Prompt source that draws the prompts submitted to a ledger, without their text."""

    rows = 1 << 30
    """Upper limit of the number of prompts; no test submits as many."""

    def __init__(self, ledger: Ledger):
        self.ledger = ledger

    def draw(self, cursor):
        _, row = cursor
        return (0, row, b"") if row in self.ledger.prompts.submitted else None


# --- the run ----------------------------------------------------------------------------------------------------------


STEPS, SLOTS, MANY_PROMPTS = 10, 6, 1000
PASSES = 20_000
"""Most loop iterations of a run, after which it counts as stuck; far more than any run needs."""
ROUNDS = 50
"""Most rounds in a row that may end without any work in between."""


def advance(schedule: Schedule, ledger: Ledger) -> bool:
    """Advance the schedule as the broker's service does; returns whether a round ended.

    Raises AssertionError if `ROUNDS` rounds end one after the other without any work.
    """
    for ended in range(ROUNDS):
        if not schedule.advance(ledger):
            return ended > 0
    raise AssertionError("rounds end one after the other, and nothing happens in them")


def run_to_the_end(section: ScheduleSection, staleness: int = 5, prompts: int = MANY_PROMPTS) -> Ledger:
    """Run one worker and a learner until the schedule is finished; returns the ledger.

    Raises AssertionError if the schedule never finishes, or finishes early with prompts left.
    """
    section = section.model_copy(update={"max_steps": STEPS, "max_staleness": staleness})
    schedule = make_schedule(section, NumberedPrompts(prompts, 1))
    ledger = Ledger(Rules(section.rollout_batch_size, section.n_samples_per_prompt, max_staleness=staleness))
    ledger.start_learner(0)
    lengths: dict[int, int] = {}
    for _ in range(PASSES):
        if advance(schedule, ledger):
            for lease_id in lengths:
                ledger.end_lease(lease_id, "abort")
            lengths.clear()
        if schedule.finished(ledger) and ledger.steps.consumed == ledger.steps.next:
            break
        work(schedule, ledger, lengths)
        if ledger.steps.consumed < ledger.steps.next:
            ledger.consume(ledger.steps.consumed)
    else:
        raise AssertionError(f"the run stands still before batch {ledger.steps.next} of {STEPS}")
    assert ledger.account.closed
    if prompts == MANY_PROMPTS:
        assert ledger.steps.consumed == STEPS
        assert sum(len(groups) for groups in ledger.deliveries.values()) == STEPS * section.rollout_batch_size
    return ledger


def work(schedule: Schedule, ledger: Ledger, lengths: dict[int, int]) -> None:
    """Fill the worker's slots and generate one token of each response. `lengths`: final length of each response in
    tokens, by lease id."""
    version = Version(0, ledger.steps.consumed)
    while len(lengths) < SLOTS and (sample := choose_sample(schedule, ledger, version)):
        lease = ledger.lease(sample, "w", version.step, 0.0)
        lengths[lease.id] = 1 + (sample.group.id * 7 + sample.index * 3) % 11 * 3
    for lease_id in list(lengths):
        sample = ledger.leases[lease_id].sample
        done = sample.length + 1 >= lengths[lease_id]
        assert ledger.add_chunk(lease_id, sample.length, 1, version, "stop" if done else "") is Verdict.OK
        if done:
            ledger.score(lease_id, 1.0)
            del lengths[lease_id]
