"""Judges a run with agents, whose samples are sessions of turns with forks, driven by programs."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.journal_history import History, Row
from tests.support.stored_executions import agree, executions

FORKS = 256
"""Lease ids reserved for a session, one for each fork."""


@dataclass
class Fork:
    """A fork of a session, as the journal has it."""

    length: int = 0
    """Tokens of both sides, including those shared with its parent."""
    sampled: list[tuple[int, int]] = field(default_factory=list)
    """(start, end) of the tokens that the policy has sampled in it."""
    turn_ends: list[int] = field(default_factory=list)

    def behind(self, length: int) -> int:
        """Sampled tokens after the first `length` tokens."""
        return sum(end - max(start, length) for start, end in self.sampled if end > length)

    def turn_end(self, most: int) -> int:
        return max((end for end in self.turn_ends if end <= most), default=0)

    def cut(self, length: int) -> int:
        dropped = self.behind(length)
        self.sampled = [(start, min(end, length)) for start, end in self.sampled if start < length]
        return dropped


class SessionHistory(History):
    def __init__(self, run_dir: Path, prompt_rows: int):
        self.sessions: dict[int, tuple] = {}
        """(group, index, attempt) by lease id; a failed agent starts another attempt."""
        self.turns: dict[int, tuple] = {}
        """(session, fork number) by the lease of a worker."""
        self.attempts: Counter = Counter()
        """Failed attempts by (group, index)."""
        self.forks: defaultdict[tuple, dict[int, Fork]] = defaultdict(lambda: defaultdict(Fork))
        """Forks by session and fork number."""
        self.discarded: Counter = Counter()
        super().__init__(run_dir, prompt_rows)

    # --- facts ----------------------------------------------------------------------------------------------

    def on_AgentLeased(self, lease_id, group, index, *_):
        self.expect(lease_id % FORKS == 0, f"session {lease_id} has ids of another")
        self.samples[lease_id] = (group, index)
        self.sessions[lease_id] = (group, index, self.attempts[group, index])

    def on_Leased(self, lease_id, group, index, worker, step, scoring, fork_number=0):
        super().on_Leased(lease_id, group, index)
        self.turns[lease_id] = (group, index, self.attempts[group, index]), fork_number

    def fork_of(self, lease_id) -> Fork:
        """The fork of a worker's lease on a turn, or of a session's lease id plus a fork number."""
        session, fork_number = self.turns.get(lease_id) or (
            self.sessions.get(lease_id - lease_id % FORKS), lease_id % FORKS
        )  # fmt: skip
        return self.forks[session][fork_number]

    def take(self, row: Row, payload: bytes) -> None:
        fork, said_by_policy = self.fork_of(row.lease_id), row.kind == 0
        if not fork.length and row.start:
            parent = self.fork_of(row.lease_id - row.lease_id % FORKS + row.parent)
            self.expect(
                row.start in parent.turn_ends, f"a fork of lease {row.lease_id} does not begin at the end of a turn"
            )
            fork.length = row.start
        self.expect(fork.length == row.start, f"a row at {row.start} of lease {row.lease_id} follows {fork.length}")
        self.expect(len(payload) >= (8 if said_by_policy else 4) * row.count, f"a row of {row.lease_id} lacks tokens")
        fork.length = end = row.start + row.count
        if said_by_policy:
            fork.sampled.append((row.start, end))
        if said_by_policy and row.finish:
            fork.turn_ends.append(end)
        if row.ends_lease:
            self.ended.add(row.lease_id)

    def on_SampleScored(self, lease_id, reward, details=None, superseded=()):
        super().on_SampleScored(lease_id)
        session, known = self.sessions[lease_id], dict(superseded)
        for fork_number, fork in self.forks[session].items():
            self.cut(session, fork, fork.turn_end(fork.length), "unread")
            self.cut(session, fork, fork.turn_end(known.get(fork_number, fork.length)), "superseded")

    def on_LeaseEnded(self, lease_id, cause, *_):
        super().on_LeaseEnded(lease_id)
        if cause == "agent_failed":
            session = self.sessions[lease_id]
            for fork in self.forks[session].values():
                self.cut(session, fork, 0, cause)
            self.attempts[session[:2]] += 1

    def cut(self, session, fork, length, reason) -> None:
        """Cut a fork, and count what is discarded; held-out samples do not count."""
        if session[0] in self.sizes and (dropped := fork.cut(length)):
            self.discarded[reason] += dropped

    # --- verdict --------------------------------------------------------------------------------------------

    def held(self, lease_id: int) -> int:
        return self.fork_of(lease_id).length

    def books(self) -> tuple[Counter, Counter]:
        kept = Counter()
        for (group, *_), forks in self.forks.items():
            kept[group] += sum(fork.behind(0) for fork in forks.values())
        return kept, self.discarded

    def judge_agents(self, read: Path) -> list[str]:
        """Expect that a program that was run again has read the same answers as before, unless its session was started
        anew. `read`: folder of what the programs have written, a file a sample."""
        again = 0
        for sample, runs in executions(read):
            again += len(runs) - 1
            if not self.attempts[tuple(map(int, sample.split("-")))]:
                self.expect(agree(runs), f"{sample} was answered otherwise when it asked again")
        self.expect(again > 0, "no program was run again")
        return self.wrongs

    def sessions_table(self) -> str:
        """Outcome of the training sessions, in one sentence."""
        scored = sum(len(self.scored[group]) for group in self.sizes)
        forks = [fork for session, forks in self.forks.items() if session[0] in self.sizes for fork in forks.values()]
        turns, anew = sum(len(fork.turn_ends) for fork in forks), sum(self.attempts.values())
        return (
            f"{scored} sessions with one reward each, {anew} that began from nothing; {len(forks)} forks, "
            f"{turns} turns; discarded: {dict(self.discarded)}"
        )
