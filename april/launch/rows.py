"""What a run's rows are to its tokenizer: lengths against the budgets, and characters that it cannot express."""

import unicodedata
from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from april.broker.prompts import PromptBook
from april.config import Config, SourceSection
from april.data.dataset import Dataset
from april.data.rows import BadRow, Row, text_of
from april.data.tokenizer import Tokenizer
from april.launch.check import Findings

FIRST_ROWS = 1000
"""that are looked at, and the last"""
CHARACTERS_SHOWN = 8


class Seen(NamedTuple):
    """A row that was looked at."""

    where: str
    row: Row
    tokens: np.ndarray
    """int32: its prompt, none of an agent's task"""


def rows_of(dataset: Dataset, sources: Sequence[SourceSection]) -> Iterable[tuple[str, Row]]:
    """The first and the last, and where each is: its place among the source's rows that can be used, from 1."""
    numbers = list(range(min(len(dataset), FIRST_ROWS))) + ([len(dataset) - 1] if len(dataset) > FIRST_ROWS else [])
    starts = np.cumsum([0, *dataset.counts])
    for number in numbers:
        source = int(np.searchsorted(starts, number, side="right")) - 1
        yield f"{sources[source].path}, row {number - starts[source] + 1}", dataset[number]


def look_at_rows(config: Config, book: PromptBook, found: Findings) -> list[Seen]:
    """Those of the training prompts, then those held out."""
    data, tokenizer = config.data, book.tokenizer
    held_out = [place for one in book.held_out.values() for place in rows_of(one.rows, [one.asked.source])]
    places = [*rows_of(book.rows, data.train_sources), *held_out]
    seen, refused = [], []
    for where, row in places:
        try:
            tokens = np.zeros(0, np.int32)
            if not config.agent.is_set:
                tokens = tokenizer.encode_prompt(row.prompt, data.template_options)
            seen.append(Seen(where, row, tokens))
        except BadRow as error:
            refused.append(f"{where}: {error}")
    if refused:
        found.remarks.append(f"{len(refused)} of {len(places)} prompts are left out, the first {refused[0]}")
    if seen:
        say_lengths(config, book, seen, found)
        say_characters(tokenizer, seen, found)
    return seen


def say_lengths(config: Config, book: PromptBook, seen: list[Seen], found: Findings) -> None:
    most, budget = book.max_prompt_tokens, config.sampling.max_response_tokens
    lengths = [len(one.tokens) for one in seen]
    counts = book.counts()
    read = f"{counts['rows']:,} rows" + (f", {counts['bad_rows']:,} bad ones left out" if counts["bad_rows"] else "")
    count = sum(len(one.rows) for one in book.held_out.values())
    held_out = f" and {count:,} held out" if count else ""
    spread = "" if config.agent.is_set else f"; {span(lengths)} in the {len(seen):,} looked at, {most:,} at most"
    found.facts["prompts"] = f"{read}{held_out}{spread}"
    outside = [one.where for one in seen if not 0 < len(one.tokens) <= most]
    if outside and not config.agent.is_set:
        found.remarks.append(
            f"{len(outside)} of {len(seen)} prompts are left out, the first {outside[0]}: between 1 and {most} tokens "
            "are wanted; raise data.max_prompt_tokens, or lower sampling.max_response_tokens if the context is short"
        )
    answers = [len(book.tokenizer.encode_prompt(one.row.label)) for one in seen]
    found.facts["answers"] = f"{span(answers)}, of a budget of {budget:,}"
    too_long = [one.where for one, length in zip(seen, answers, strict=True) if length > budget]
    if too_long:
        found.remarks.append(
            f"{len(too_long)} of {len(seen)} reference answers have more tokens than sampling.max_response_tokens = "
            f"{budget}, the first {too_long[0]}; raise it if responses contain them"
        )


def span(lengths: Sequence[int]) -> str:
    few, many = min(lengths), max(lengths)
    return f"{many:,} tokens" if few == many else f"{few:,} to {many:,} tokens, {median(lengths):,.0f} in the median"


def say_characters(tokenizer: Tokenizer, seen: list[Seen], found: Findings) -> None:
    texts = {
        "prompts": ((one.where, prompt_text(one.row)) for one in seen),
        "reference answers": ((one.where, one.row.label) for one in seen),
    }
    meaning = {"prompts": "the policy does not read them", "reference answers": "the policy cannot write them"}
    for what, pairs in texts.items():
        first: dict[str, str] = {}
        for where, text in pairs:
            for character in set(text) - first.keys():
                first[character] = where
        lost = [character for character in sorted(first) if not is_expressed(character, tokenizer)]
        if lost:
            shown = ", ".join(map(repr, lost[:CHARACTERS_SHOWN]))
            more = f" and {len(lost) - CHARACTERS_SHOWN} more" if len(lost) > CHARACTERS_SHOWN else ""
            found.remarks.append(
                f"the tokeniser of {str(tokenizer.path)!r} cannot express {shown}{more} of the {what}, {lost[0]!r} "
                f"first in {first[lost[0]]}: {meaning[what]}; take another tokeniser, or mend the rows"
            )


def prompt_text(row: Row) -> str:
    return row.prompt if isinstance(row.prompt, str) else "\n".join(map(text_of, row.prompt))


def is_expressed(character: str, tokenizer: Tokenizer) -> bool:
    """Whether it comes out of the tokeniser again, as a variant of itself perhaps."""
    ids = tokenizer.encode_prompt(character).tolist()
    if not ids or tokenizer.inner.unk_token_id in ids:
        return False
    return character.isspace() or plain(character) in plain(tokenizer.decode(ids))


def plain(text: str) -> str:
    return unicodedata.normalize("NFKC", text).casefold()
