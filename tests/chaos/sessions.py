"""Judges a run with agents: its samples are sessions, with branches of turns, which programs speak for."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from tests.agents.read import agree, executions
from tests.chaos.history import History, Row

BRANCHES = 256
"""ids that belong to the lease of a session, one for each branch"""


@dataclass
class Line:
    """A branch of a session, as the journal has it."""

    length: int = 0
    """tokens of both sides, those included that it shares with its parent"""
    sampled: list[tuple[int, int]] = field(default_factory=list)
    """(start, end) of what the policy has said in it"""
    turn_ends: list[int] = field(default_factory=list)

    def behind(self, length: int) -> int:
        """Sampled tokens behind so many."""
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
        """(group, index, life) by lease id; a session begins another life where its agent has failed"""
        self.turns: dict[int, tuple] = {}
        """(session, branch) by the lease of a worker"""
        self.lives: Counter = Counter()
        self.lines: defaultdict[tuple, dict[int, Line]] = defaultdict(lambda: defaultdict(Line))
        """by session, then by branch"""
        self.discarded: Counter = Counter()
        super().__init__(run_dir, prompt_rows)

    # --- facts ----------------------------------------------------------------------------------------------

    def on_AgentLeased(self, lease_id, group, index, *_):
        self.expect(lease_id % BRANCHES == 0, f"session {lease_id} has ids of another")
        self.samples[lease_id] = (group, index)
        self.sessions[lease_id] = (group, index, self.lives[group, index])

    def on_Leased(self, lease_id, group, index, worker, step, scoring, branch=0):
        super().on_Leased(lease_id, group, index)
        self.turns[lease_id] = (group, index, self.lives[group, index]), branch

    def line_of(self, lease_id) -> Line:
        """Of a worker's lease on a turn, or of a session's id for one of its branches."""
        session, branch = self.turns.get(lease_id) or (
            self.sessions.get(lease_id - lease_id % BRANCHES), lease_id % BRANCHES
        )  # fmt: skip
        return self.lines[session][branch]

    def take(self, row: Row, payload: bytes) -> None:
        line, said_by_policy = self.line_of(row.lease_id), row.kind == 0
        if not line.length and row.start:
            parent = self.line_of(row.lease_id - row.lease_id % BRANCHES + row.parent)
            self.expect(row.start in parent.turn_ends, f"a branch of lease {row.lease_id} leaves no end of a turn")
            line.length = row.start
        self.expect(line.length == row.start, f"a row at {row.start} of lease {row.lease_id} follows {line.length}")
        self.expect(len(payload) >= (8 if said_by_policy else 4) * row.count, f"a row of {row.lease_id} lacks tokens")
        line.length = end = row.start + row.count
        if said_by_policy:
            line.sampled.append((row.start, end))
        if said_by_policy and row.finish:
            line.turn_ends.append(end)
        if row.over:
            self.ended.add(row.lease_id)

    def on_SampleScored(self, lease_id, reward, details=None, superseded=()):
        super().on_SampleScored(lease_id)
        session, known = self.sessions[lease_id], dict(superseded)
        for branch, line in self.lines[session].items():
            self.cut(session, line, line.turn_end(line.length), "unread")
            self.cut(session, line, line.turn_end(known.get(branch, line.length)), "superseded")

    def on_LeaseEnded(self, lease_id, cause, *_):
        super().on_LeaseEnded(lease_id)
        if cause == "agent_failed":
            session = self.sessions[lease_id]
            for line in self.lines[session].values():
                self.cut(session, line, 0, cause)
            self.lives[session[:2]] += 1

    def cut(self, session, line, length, reason) -> None:
        """Held-out samples are not in the books of what is discarded."""
        if session[0] in self.sizes and (dropped := line.cut(length)):
            self.discarded[reason] += dropped

    # --- verdict --------------------------------------------------------------------------------------------

    def held(self, lease_id: int) -> int:
        return self.line_of(lease_id).length

    def books(self) -> tuple[Counter, Counter]:
        kept = Counter()
        for (group, *_), lines in self.lines.items():
            kept[group] += sum(line.behind(0) for line in lines.values())
        return kept, self.discarded

    def judge_agents(self, read: Path) -> list[str]:
        """A program that was run again has read the same answers up to where it was, unless it began from nothing.
        `read`: what programs have written down, a file a sample."""
        again = 0
        for sample, runs in executions(read):
            again += len(runs) - 1
            if not self.lives[tuple(map(int, sample.split("-")))]:
                self.expect(agree(runs), f"{sample} was answered otherwise when it asked again")
        self.expect(again > 0, "no program was run again")
        return self.wrongs

    def sessions_table(self) -> str:
        """What became of the sessions of training."""
        scored = sum(len(self.scored[group]) for group in self.sizes)
        lines = [line for session, lines in self.lines.items() if session[0] in self.sizes for line in lines.values()]
        turns, anew = sum(len(line.turn_ends) for line in lines), sum(self.lives.values())
        return (
            f"{scored} sessions with one reward each, {anew} that began from nothing; {len(lines)} branches, "
            f"{turns} turns; discarded: {dict(self.discarded)}"
        )
