"""Validates all rows of a report against their payloads at once.

A report that cannot be parsed into rows is refused as a whole. A fault in the tokens of one row refuses only that row.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
from zlib_ng.zlib_ng import crc32

from april import wire
from april.broker.ledger.samples import Lease
from april.config import Config
from april.data.images import PROMPT_IMAGES
from april.data.support import Support
from april.wire import limits
from april.wire.rows import FINISH_REASONS, OBSERVATION, TABLE, padded_sizes

NOT_FINITE = 0x7F800000
"""Bit pattern of float32 infinity as an integer, without the sign bit; the patterns of NaN are larger."""
LARGEST_LOGPROB = np.float32(1e-3)
"""Largest accepted log-probability: above 0 only because of rounding."""
LARGEST_LOGPROB_BITS = int(LARGEST_LOGPROB.view(np.int32))
SMALLEST_LOGPROB = np.float32(-1e4)
"""Smallest accepted log-probability; no engine draws a token as unlikely as this."""
SMALLEST_LOGPROB_BITS = int(abs(SMALLEST_LOGPROB).view(np.int32))
ABOVE_ZERO, BELOW_ALL = "a logprob is above 0", f"a logprob is below {SMALLEST_LOGPROB:g}"


def read_report(packed: list[wire.PackedArray]) -> tuple[np.ndarray, wire.PackedArray]:
    """Read a report with at least one row: the rows, dtype `TABLE`, and their payloads. Raises WireError."""
    if (
        [array.dtype for array in packed] != ["u1", "u1"]
        or not len(packed[0].data)
        or len(packed[0].data) % TABLE.itemsize
    ):
        raise wire.WireError(f"a report carries rows of {TABLE.itemsize} bytes, and their payloads")
    table, payload = np.frombuffer(packed[0].data, TABLE), packed[1]
    if len(table) > limits.MAX_REPORT_ROWS:
        raise wire.WireError(f"a report has at most {limits.MAX_REPORT_ROWS} rows")
    known = (table["kind"] <= OBSERVATION) & (table["finish"] < len(FINISH_REASONS)) & (table["failed"] <= 1)
    if not known.all() or table["ends_lease"].any() or not np.isfinite(table["time"]).all():
        raise wire.WireError("a row has a kind, an ending or a time that is none")
    tokens = table["tokens"]
    if (
        not tokens.all()
        or int(tokens.max()) > limits.MAX_CHUNK_TOKENS
        or (table["size"] < 4 * tokens.astype(np.int64)).any()
    ):
        raise wire.WireError(f"a row has from 1 to {limits.MAX_CHUNK_TOKENS} tokens, whose ids are in its payload")
    if int(padded_sizes(table).sum()) != len(payload.data):
        raise wire.WireError("the payloads of the rows are not as long as the rows say")
    return table, payload


def turn_requests(table: np.ndarray, payload: wire.PackedArray) -> list[wire.TurnRequest | None]:
    """Decode the state field of each observation row of an agents process, a `TurnRequest`; None for a row in which it
    is invalid."""
    view, ends = memoryview(payload.data), np.cumsum(padded_sizes(table))
    begins = ends - padded_sizes(table) + 4 * table["tokens"].astype(np.int64)
    lengths = table["size"] - 4 * table["tokens"].astype(np.int64)
    return [
        turn_request(view[begin : begin + length])
        for begin, length in zip(begins.tolist(), lengths.tolist(), strict=True)
    ]


def turn_request(state: bytes | memoryview) -> wire.TurnRequest | None:
    try:
        request = msgspec.msgpack.decode(state, type=wire.TurnRequest)
    except msgspec.DecodeError:
        return None
    is_valid = (
        len(request.stop_token_ids) <= wire.MAX_STOP_TOKENS
        and len(request.key) <= wire.MAX_KEY_BYTES
        and request.max_tokens > 0
        and len(request.images) <= PROMPT_IMAGES
    )
    return request if is_valid else None


class RowValidator:
    """Finds faults in the payloads of rows, by the rules of one run."""

    def __init__(self, config: Config):
        self.largest_id = (config.vocabulary or 1 << 31) - 1
        self.has_environment = bool(config.environment.name)
        self.is_cut = config.sampling.is_cut
        self.oldest_s = config.broker.max_run_s + limits.MAX_CLOCK_SKEW_S
        """Largest plausible age of a row's sampling time in seconds: longest duration of a lease plus largest clock
        skew."""
        self.ids_wrong = f"the policy's token ids are from 0 to {self.largest_id}"

    def read(self, packed: list[wire.PackedArray], now: float) -> tuple[np.ndarray, wire.PackedArray]:
        """Read a report that came at `now`, like `read_report`. A sampling time that is implausibly old, or in the
        future, comes from a wrong clock. It becomes 0 (unknown), since it would stretch the time axis of the run's
        charts."""
        table, payload = read_report(packed)
        age_s = np.where(table["time"] == 0, 0, now - table["time"])
        beyond = (age_s > self.oldest_s) | (age_s < -limits.MAX_CLOCK_SKEW_S)
        if beyond.any():
            table = table.copy()
            table["time"][beyond] = 0
        return table, payload

    def faults(
        self,
        table: np.ndarray,
        payload: wire.PackedArray,
        leases: Sequence[Lease | None],
        requests: Sequence[wire.TurnRequest | None] | None = None,
    ) -> dict[int, str]:
        """Find faults in the rows (`table`, dtype `TABLE`) and payloads of a report; returns them by row index.
        `leases`: the lease of each row, None if it is not current; `requests`: for a report of agents, the result of
        `turn_requests`."""
        found: dict[int, str] = {}
        ends = np.cumsum(padded_sizes(table))
        offsets, sizes, tokens = ends - padded_sizes(table), table["size"], table["tokens"].astype(np.int64)
        view, observed = memoryview(payload.data), table["kind"] == OBSERVATION
        for index, (offset, size, checksum) in enumerate(
            zip(offsets.tolist(), sizes.tolist(), table["checksum"].tolist(), strict=True)
        ):
            if crc32(view[offset : offset + size]) != checksum:
                found[index] = "its checksum does not agree"
        words = np.frombuffer(payload.data, "<u4")
        bounds = np.stack([offsets // 4, offsets // 4 + tokens], axis=1).reshape(-1)
        if bounds[-1] == len(words):  # nothing follows the last row's ids
            words = np.append(words, np.uint32(0))
        largest = np.maximum.reduceat(words, bounds)[::2]
        self._note(found, largest > self.largest_id, self.ids_wrong)  # as uint32 a negative id is larger than any
        self._note(found, observed & ((table["incarnation"] | table["step"]) > 0), "an observation has no version")
        plain = ~observed & (sizes == 8 * tokens)
        largest_logprob_bits = np.maximum.reduceat(words & np.uint32(0x7FFFFFFF), bounds)[1::2]
        self._note(found, plain & (largest_logprob_bits >= NOT_FINITE), "a logprob is not finite")
        self._note(found, plain & (largest_logprob_bits > SMALLEST_LOGPROB_BITS), BELOW_ALL)
        largest_logprob = np.maximum.reduceat(words.view("<i4"), bounds)[1::2]  # as int32, negative floats are negative
        self._note(found, plain & (largest_logprob > LARGEST_LOGPROB_BITS), ABOVE_ZERO)
        state_bytes = sizes - 4 * tokens
        if requests is not None:
            self._note(found, ~observed, "an agent says observations, and samples nothing")
            self._note(found, np.array([request is None for request in requests]), "its state is no turn request")
        elif self.has_environment:
            wrong = f"the state of an environment has at most {limits.MAX_STATE_BYTES} bytes"
            self._note(found, observed & (state_bytes > limits.MAX_STATE_BYTES), wrong)
        else:
            self._note(found, observed, "this run has no environment")
        if not self.is_cut:
            self._note(found, ~observed & ~plain, "a chunk carries ids int32 and logprobs float32, no more")
            return found
        for index in np.flatnonzero(~observed).tolist():
            own = words[bounds[2 * index] : int(ends[index]) // 4]
            if index not in found and (lease := leases[index]):
                is_cut = not lease.sample.group.evaluation
                if fault := self._cut_fault(own, int(sizes[index]), int(tokens[index]), is_cut):
                    found[index] = fault
        return found

    @staticmethod
    def _note(found: dict[int, str], where: np.ndarray, fault: str) -> None:
        for index in np.flatnonzero(where).tolist():
            found.setdefault(index, fault)

    def _cut_fault(self, words: np.ndarray, size: int, tokens: int, is_cut: bool) -> str:
        """Fault of a chunk with supports, in a run that truncates the sampling distribution (top-p, top-k, min-p);
        empty if it is valid. `words`: the payload in 4-byte words; `size`: its bytes; `tokens`: tokens of the chunk;
        `is_cut`: whether they must have supports."""
        if size % 4 or is_cut != (len(words) > 2 * tokens):
            return "training tokens come with their supports where the distribution is cut, no others do"
        if not is_cut:
            return "" if len(words) == 2 * tokens else "a chunk carries a logprob for each id"
        ids, logprobs, supports = (
            words[:tokens].view("<i4"),
            words[tokens : 2 * tokens].view("<f4"),
            words[2 * tokens :],
        )
        support = Support(supports[:tokens].view("<i4"), supports[tokens:].view("<i4"))
        if not np.isfinite(logprobs).all():
            return "a logprob is not finite"
        if logprobs.max() > LARGEST_LOGPROB or logprobs.min() < SMALLEST_LOGPROB:
            return ABOVE_ZERO if logprobs.max() > LARGEST_LOGPROB else BELOW_ALL
        if not support.holds(ids) or support.counts.max() > limits.MAX_SUPPORT_IDS:
            return f"a support has at most {limits.MAX_SUPPORT_IDS} ids, and the token that was drawn among them"
        return self.ids_wrong if supports[tokens:].max() > self.largest_id else ""
