"""What may be wrong with the rows of a report, found for all of them at once: what each row says against its payload.

What cannot be read as rows refuses the report. What is wrong with the tokens of one row refuses that row alone.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
from zlib_ng.zlib_ng import crc32

from april import wire
from april.broker.ledger.samples import Lease
from april.config import Config
from april.data.support import Support
from april.wire import limits
from april.wire.rows import ENDINGS, OBSERVATION, TABLE, padded_sizes

NOT_FINITE = 0x7F800000
"""bits of an infinite float32; those of one that is no number are more"""


def read_report(packed: list[wire.Packed]) -> tuple[np.ndarray, wire.Packed]:
    """The rows of a report, at least one, as a table of `TABLE`, and their payloads. Raises WireError."""
    if [one.dtype for one in packed] != ["u1", "u1"] or not len(packed[0].data) or len(packed[0].data) % TABLE.itemsize:
        raise wire.WireError(f"a report carries rows of {TABLE.itemsize} bytes, and their payloads")
    table, payload = np.frombuffer(packed[0].data, TABLE), packed[1]
    if len(table) > limits.REPORT_ROWS:
        raise wire.WireError(f"a report has at most {limits.REPORT_ROWS} rows")
    known = (table["kind"] <= OBSERVATION) & (table["finish"] < len(ENDINGS)) & (table["failed"] <= 1)
    if not known.all() or table["over"].any() or not np.isfinite(table["time"]).all():
        raise wire.WireError("a row has a kind, an ending or a time that is none")
    tokens = table["tokens"]
    if (
        not tokens.all()
        or int(tokens.max()) > limits.CHUNK_TOKENS
        or (table["size"] < 4 * tokens.astype(np.int64)).any()
    ):
        raise wire.WireError(f"a row has from 1 to {limits.CHUNK_TOKENS} tokens, whose ids are in its payload")
    if int(padded_sizes(table).sum()) != len(payload.data):
        raise wire.WireError("the payloads of the rows are not as long as the rows say")
    return table, payload


def is_turn_request(state: bytes) -> bool:
    try:
        request = msgspec.msgpack.decode(state, type=wire.TurnRequest)
    except msgspec.DecodeError:
        return False
    return len(request.stops) <= wire.STOPS and len(request.key) <= wire.KEY_BYTES and request.max_tokens > 0


class RowChecks:
    def __init__(self, config: Config):
        self.largest_id = (config.vocabulary or 1 << 31) - 1
        self.has_environment = bool(config.environment.name)
        self.cuts = config.sampling.is_cut
        self.ids_wrong = f"the policy's token ids are from 0 to {self.largest_id}"

    def faults(
        self, table: np.ndarray, payload: wire.Packed, leases: Sequence[Lease | None], of_agents: bool = False
    ) -> dict[int, str]:
        """What is wrong with the tokens of which rows, by their place; `leases`: of each row."""
        found: dict[int, str] = {}
        ends = np.cumsum(padded_sizes(table))
        offsets, sizes, tokens = ends - padded_sizes(table), table["size"], table["tokens"].astype(np.int64)
        view, observed = memoryview(payload.data), table["kind"] == OBSERVATION
        for place, (offset, size, checksum) in enumerate(
            zip(offsets.tolist(), sizes.tolist(), table["checksum"].tolist(), strict=True)
        ):
            if crc32(view[offset : offset + size]) != checksum:
                found[place] = "its checksum does not agree"
        words = np.frombuffer(payload.data, "<u4")
        parts = np.stack([offsets // 4, offsets // 4 + tokens], axis=1).reshape(-1)
        if parts[-1] == len(words):  # nothing is behind the last row's ids
            words = np.append(words, np.uint32(0))
        largest = np.maximum.reduceat(words, parts)[::2]
        self._note(found, largest > self.largest_id, self.ids_wrong)  # a negative one is larger than any
        self._note(found, observed & ((table["branch"] | table["step"]) > 0), "an observation is of no version")
        plain = ~observed & (sizes == 8 * tokens)
        size_of_logprobs = np.maximum.reduceat(words & np.uint32(0x7FFFFFFF), parts)[1::2]
        self._note(found, plain & (size_of_logprobs >= NOT_FINITE), "a logprob is not finite")
        state_bytes = sizes - 4 * tokens
        if of_agents:
            self._note(found, ~observed, "an agent says observations, and samples nothing")
            requests = (
                bytes(view[end - rest : end])
                for end, rest in zip((offsets + sizes).tolist(), state_bytes.tolist(), strict=True)
            )
            self._note(found, np.array([not is_turn_request(one) for one in requests]), "its state is no turn request")
        elif self.has_environment:
            wrong = f"the state of an environment has at most {limits.STATE_BYTES} bytes"
            self._note(found, observed & (state_bytes > limits.STATE_BYTES), wrong)
        else:
            self._note(found, observed, "this run has no environment")
        if not self.cuts:
            self._note(found, ~observed & ~plain, "a chunk carries ids int32 and logprobs float32, no more")
            return found
        for place in np.flatnonzero(~observed).tolist():
            own = words[parts[2 * place] : int(ends[place]) // 4]
            if place not in found and (lease := leases[place]):
                is_cut = not lease.sample.group.evaluation
                if fault := self._fault_of_cut(own, int(sizes[place]), int(tokens[place]), is_cut):
                    found[place] = fault
        return found

    @staticmethod
    def _note(found: dict[int, str], where: np.ndarray, fault: str) -> None:
        for place in np.flatnonzero(where).tolist():
            found.setdefault(place, fault)

    def _fault_of_cut(self, words: np.ndarray, size: int, tokens: int, is_cut: bool) -> str:
        """Of a chunk in a run that cuts the distribution of its training samples."""
        if size % 4 or is_cut != (len(words) > 2 * tokens):
            return "training tokens come with their supports where the distribution is cut, no others do"
        if not is_cut:
            return "" if len(words) == 2 * tokens else "a chunk carries a logprob for each id"
        ids, logprobs, numbers = words[:tokens].view("<i4"), words[tokens : 2 * tokens].view("<f4"), words[2 * tokens :]
        support = Support(numbers[:tokens].view("<i4"), numbers[tokens:].view("<i4"))
        if not np.isfinite(logprobs).all():
            return "a logprob is not finite"
        if not support.holds(ids) or support.counts.max() > limits.SUPPORT_IDS:
            return f"a support has at most {limits.SUPPORT_IDS} ids, and the token that was drawn among them"
        return self.ids_wrong if numbers[tokens:].max() > self.largest_id else ""
