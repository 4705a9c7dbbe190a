"""Inspects conversations before a run trains them: their lengths, and which cannot be trained."""

import math
import time
from collections.abc import Sequence

from april.config import Config, SourceSection
from april.data.conversation_rows import ConversationRows
from april.data.rows import BadRow
from april.data.tokenizer import Tokenizer
from april.launch.findings import Findings
from april.launch.row_checks import MORE_ROWS_S, length_range, located


def inspect_sft_sources(config: Config, tokenizer: Tokenizer, found: Findings, everything: bool) -> None:
    """Inspect the rows of the sources of kind sft of a run: `everything`: all, otherwise for a second."""
    for number, source in config.data.sft_sources.items():
        rows = found.run_check(ConversationRows, [source], config, tokenizer)
        patience_s = math.inf if everything else MORE_ROWS_S
        if rows and (line := inspect_conversations(config, rows, [source], found, patience_s)):
            found.facts[f"sft {number}"] = f"{len(rows.rows):,} rows of {source.named()}; {line}"


def inspect_conversations(
    config: Config, rows: ConversationRows, sources: Sequence[SourceSection], found: Findings, patience_s: float
) -> str:
    """Make tokens of the rows of `sources`, for `patience_s` seconds; records those that are left out, and an error for
    the first that cannot be trained. Returns a line about their lengths, empty if no row could be looked at."""
    deadline, lengths, trained = time.monotonic() + patience_s, list[int](), 0
    too_long, refused, endless = list[str](), list[str](), list[str]()
    ends_turn = rows.encoder.tokenizer.eos_token_ids
    for where, _, row in located(rows.rows, sources, range(len(rows.rows))):
        if time.monotonic() > deadline:
            break
        try:
            conversation = rows.encoder.encode(row)
        except BadRow as error:
            refused.append(f"{where}: {error}")
            continue
        lengths.append(len(conversation.tokens))
        trained += int(conversation.is_trained.sum())
        if int(conversation.tokens[conversation.is_trained][-1]) not in ends_turn:
            endless.append(where)
        if lengths[-1] > rows.max_tokens:
            too_long.append(where)
    looked_at = len(lengths) + len(refused)
    if refused and (config.data.bad_rows == "stop" or len(refused) == looked_at):
        found.errors.append(
            f"{refused[0]} ({len(refused)} of {looked_at} rows cannot be trained; mend them, or leave them out with "
            "data.bad_rows = 'skip')"
        )
    elif refused:
        found.warnings.append(f"{len(refused)} of {looked_at} rows are left out; the first is {refused[0]}")
    if too_long:
        found.warnings.append(
            f"{len(too_long)} of {looked_at} rows are left out, the first {too_long[0]}: they have more than "
            f"{rows.max_tokens} tokens; raise sft.max_tokens if the model's context has room"
        )
    if endless and config.sft.train_on == "assistant":
        found.warnings.append(
            f"the chat template prints no end token behind the last answer of {len(endless)} of {looked_at} rows, the "
            f"first {endless[0]}: the policy does not learn to stop there; print the model's in the template"
        )
    if lengths and len(too_long) == len(lengths):
        source = sources[0].named()
        found.errors.append(f"no row of {source} has at most {rows.max_tokens} tokens; raise sft.max_tokens")
    if not lengths:
        return ""
    return (
        f"{length_range(lengths)} in the {looked_at:,} looked at, of which {trained / sum(lengths):.0%} are trained; "
        f"{rows.max_tokens:,} at most"
    )
