"""Inspects a run's rows with its tokeniser: lengths against the budgets, characters that it cannot encode, and
conversations that cannot be trained."""

import math
import time
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from april.broker.prompts import PromptBook
from april.config import Config, SourceSection
from april.data.conversation_rows import ConversationRows
from april.data.dataset import Dataset
from april.data.rows import BadRow, DatasetRow, text_of
from april.data.tokenizer import Tokenizer, recommended_sampling
from april.launch.findings import Findings
from april.util.errors import refuse
from april.workers.engines import ENGINES

FIRST_ROWS = 1000
"""Number of rows at the beginning of each dataset that are inspected; its last row is inspected as well."""
MORE_ROWS_S = 1.0
"""Time limit, in seconds, for rendering further prompts when a run starts, after the `FIRST_ROWS` of each dataset."""
CHARACTERS_SHOWN = 8


class InspectedRow(NamedTuple):
    """A row that was inspected before the run, with its location and its prompt's tokens."""

    where: str
    """Location, such as "data/train.jsonl, row 3"."""
    dataset_row: DatasetRow
    tokens: np.ndarray
    """int32 [P]: token ids of the row's prompt; empty for an agent's task."""


def rows_of(dataset: Dataset, sources: Sequence[SourceSection]) -> Iterable[tuple[str, int, DatasetRow]]:
    """(location, number of the source, row) of the first `FIRST_ROWS` rows of a dataset and of its last row."""
    numbers = list(range(min(len(dataset), FIRST_ROWS))) + ([len(dataset) - 1] if len(dataset) > FIRST_ROWS else [])
    return located(dataset, sources, numbers)


def located(
    dataset: Dataset, sources: Sequence[SourceSection], numbers: Iterable[int]
) -> Iterator[tuple[str, int, DatasetRow]]:
    """(location, number of the source, row) of the rows with these numbers. A location counts the source's valid rows,
    from 1."""
    starts = np.cumsum([0, *dataset.counts])
    for number in numbers:
        source = int(np.searchsorted(starts, number, side="right")) - 1
        yield f"{sources[source].named()}, row {number - starts[source] + 1}", source, dataset[number]


def inspect_rows(config: Config, book: PromptBook, found: Findings, everything: bool = False) -> list[InspectedRow]:
    """Inspect training prompts, then held-out ones. Returns the usable ones among the first rows of each set; records
    facts and warnings in `found`.

    `everything`: render all prompts; otherwise the first `FIRST_ROWS` of each set, and more for `MORE_ROWS_S` seconds.
    """
    data, tokenizer = config.data, book.tokenizer
    check_takes_images(config, book)
    held_out = [
        (dataset.rows, *row)
        for dataset in book.held_out.values()
        for row in rows_of(dataset.rows, [dataset.settings.source])
    ]
    located_rows = [*((book.rows, *row) for row in rows_of(book.rows, data.train_sources)), *held_out]
    rows, refused, looked_at = [], [], len(located_rows)
    for dataset, where, source, row in located_rows:
        try:
            tokens = np.zeros(0, np.int32)
            if not config.agent.is_set:
                tokens = book.encode(dataset, row)
            if dataset is book.rows:
                book.encode_hinted(row, source)
            rows.append(InspectedRow(where, row, tokens))
        except BadRow as error:
            refused.append(f"{where}: {error}")
    deadline = math.inf if everything else time.monotonic() + MORE_ROWS_S
    sets = [(book.rows, data.train_sources), *((each.rows, [each.settings.source]) for each in book.held_out.values())]
    further = (
        (rows, *each) for rows, sources in sets for each in located(rows, sources, range(FIRST_ROWS, len(rows) - 1))
    )
    for dataset, where, source, row in () if config.agent.is_set else further:
        if time.monotonic() > deadline:
            break
        looked_at += 1
        try:
            book.encode(dataset, row)
            if dataset is book.rows:
                book.encode_hinted(row, source)
        except BadRow as error:
            refused.append(f"{where}: {error}")
    if not tokenizer.eos_token_ids | {*config.sampling.stop_token_ids}:
        found.warnings.append(
            f"neither the tokeniser nor the configuration of {str(tokenizer.path)!r} names an end token: every "
            "response goes on to sampling.max_response_tokens; name one in generation_config.json, or as "
            "sampling.stop_token_ids"
        )
    warn_of_sampling(config, found)
    if refused:
        found.warnings.append(f"{len(refused)} of {looked_at} prompts are left out, the first {refused[0]}")
    if rows:
        record_lengths(config, book, rows, found)
        warn_of_characters(tokenizer, rows, found)
    return rows


def check_takes_images(config: Config, book: PromptBook) -> None:
    """Raises ConfigError for rows with images where the engine takes none."""
    if book.with_images and not ENGINES.find(config.worker.engine).takes_images:
        able = ", ".join(repr(name) for name in ENGINES.shipped if ENGINES.find(name).takes_images)
        refuse(
            "worker.engine",
            config.worker.engine,
            "takes no images, and rows have some",
            f"use one that does ({able}), or leave the images out with data.images_key = ''",
        )


def warn_of_sampling(config: Config, found: Findings) -> None:
    """Warn of held-out prompts that are sampled otherwise than the model's makers recommend. Training prompts are not
    checked: they are sampled from the policy's own distribution, which is what is trained."""
    truncates = ENGINES.find(config.worker.engine).truncates_sampling
    for evaluated in config.evaluation_sets:
        wanted = {
            key: value
            for key, value in recommended_sampling(config.model.path).items()
            if value != getattr(evaluated, key) and (truncates or key == "temperature")
        }
        if wanted:
            keys = ", ".join(f"{evaluated.key}.{key} = {value:g}" for key, value in wanted.items())
            found.warnings.append(
                "generation_config.json of the model is read for its end tokens and not for its sampling; for figures "
                f"as its makers publish them set {keys}"
            )


def record_lengths(config: Config, book: PromptBook, rows: list[InspectedRow], found: Findings) -> None:
    """Record the lengths of prompts and reference answers, and warn of those beyond their budgets."""
    most, budget = book.max_prompt_tokens, config.sampling.max_response_tokens
    lengths = [len(row.tokens) for row in rows]
    counts = book.counts()
    read = f"{counts['rows']:,} rows" + (f", {counts['bad_rows']:,} bad ones left out" if counts["bad_rows"] else "")
    count = sum(len(dataset.rows) for dataset in book.held_out.values())
    held_out = f" and {count:,} held out" if count else ""
    spread = (
        "" if config.agent.is_set else f"; {length_range(lengths)} in the {len(rows):,} looked at, {most:,} at most"
    )
    found.facts["prompts"] = f"{read}{held_out}{spread}"
    outside = [row.where for row in rows if not 0 < len(row.tokens) <= most]
    if outside and not config.agent.is_set:
        found.warnings.append(
            f"{len(outside)} of {len(rows)} prompts are left out, the first {outside[0]}: between 1 and {most} tokens "
            "are wanted; raise data.max_prompt_tokens, or lower sampling.max_response_tokens if the context is short"
        )
    answers = [len(book.tokenizer.encode_prompt(row.dataset_row.label)) for row in rows]
    found.facts["answers"] = f"{length_range(answers)}, of a budget of {budget:,}"
    too_long = [row.where for row, length in zip(rows, answers, strict=True) if length > budget]
    if too_long:
        found.warnings.append(
            f"{len(too_long)} of {len(rows)} reference answers have more tokens than sampling.max_response_tokens = "
            f"{budget}, the first {too_long[0]}; raise it if responses contain them"
        )


def length_range(lengths: Sequence[int]) -> str:
    shortest, longest = min(lengths), max(lengths)
    return (
        f"{longest:,} tokens"
        if shortest == longest
        else f"{shortest:,} to {longest:,} tokens, {median(lengths):,.0f} in the median"
    )


def warn_of_characters(tokenizer: Tokenizer, rows: list[InspectedRow], found: Findings) -> None:
    """Warn of characters that the tokeniser cannot encode."""
    texts = {
        "prompts": ((row.where, prompt_text(row.dataset_row)) for row in rows),
        "reference answers": ((row.where, row.dataset_row.label) for row in rows),
    }
    meaning = {"prompts": "the policy does not read them", "reference answers": "the policy cannot write them"}
    for kind, pairs in texts.items():
        first: dict[str, str] = {}
        for where, text in pairs:
            for character in set(text) - first.keys():
                first[character] = where
        lost = [character for character in sorted(first) if not is_expressed(character, tokenizer)]
        if lost:
            shown = ", ".join(map(repr, lost[:CHARACTERS_SHOWN]))
            more = f" and {len(lost) - CHARACTERS_SHOWN} more" if len(lost) > CHARACTERS_SHOWN else ""
            found.warnings.append(
                f"the tokeniser of {str(tokenizer.path)!r} cannot express {shown}{more} of the {kind}, {lost[0]!r} "
                f"first in {first[lost[0]]}: {meaning[kind]}; take another tokeniser, or mend the rows"
            )


def prompt_text(row: DatasetRow) -> str:
    return row.prompt if isinstance(row.prompt, str) else "\n".join(map(text_of, row.prompt))


def is_expressed(character: str, tokenizer: Tokenizer) -> bool:
    """Whether encoding and decoding preserve a character, up to case and Unicode compatibility forms."""
    ids = tokenizer.encode_prompt(character).tolist()
    if not ids or tokenizer.inner.unk_token_id in ids:
        return False
    return character.isspace() or plain(character) in plain(tokenizer.decode(ids))


def plain(text: str) -> str:
    return unicodedata.normalize("NFKC", text).casefold()


# --- conversations ----------------------------------------------------------------------------------------------------


def inspect_sft_sources(config: Config, tokenizer: Tokenizer, found: Findings, everything: bool) -> None:
    """Inspect the rows of a run's sources of kind sft. `everything`: all rows; otherwise as many as take a second."""
    for number, source in config.data.sft_sources.items():
        rows = found.run_check(ConversationRows, [source], config, tokenizer)
        patience_s = math.inf if everything else MORE_ROWS_S
        if rows and (line := inspect_conversations(config, rows, [source], found, patience_s)):
            found.facts[f"sft {number}"] = f"{len(rows.rows):,} rows of {source.named()}; {line}"


def inspect_conversations(
    config: Config, rows: ConversationRows, sources: Sequence[SourceSection], found: Findings, patience_s: float
) -> str:
    """Tokenise rows of `sources` for `patience_s` seconds; records the rows that are left out, and an error for the
    first that cannot be trained. Returns a line about their lengths, empty if no row could be read."""
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
