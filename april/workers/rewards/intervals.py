"""Inequalities and intervals that are joined by "or", as the union of intervals that they mean."""

import re

OR = re.compile(
    r"(?:\s|,|\\q?quad|\\[,;: ])*(?:\\(?:text\w*|mathrm|mbox)\s*\{\s*or\s*\}|\\(?:lor|vee)(?![a-z])|\bor\b)"
    r"(?:\s|\\q?quad|\\[,;: ])*"
)
"""Regular expression for the word *or*."""
INTERVAL = re.compile(r"(?:([a-z]|\\[a-z]+)\s*\\in\s*)?((?:\\left)?[(\[].+[)\]]|\\\{.+\\\})")
RELATION = re.compile(r"(<=|>=|<|>|=|\\(?:le|ge|lt|gt)q?(?:slant)?(?![a-z]))")
UNKNOWN = re.compile(r"[a-z]|\\(?:theta|alpha|lambda|phi)")
SET_BUILDER = re.compile(r"\\\{\s*[a-z]\s*(?:\\in\s*\\mathbb\s*\{?\s*R\s*\}?)?\s*(?:\\mid|\\vert|[|:])(.+)\\\}")


def union_of(text: str) -> str:
    """The union of intervals that alternatives with "or" mean, such as x < 1 or x > 3; any other text unchanged."""
    if builder := SET_BUILDER.fullmatch(text.strip()):
        text = builder[1].strip()
    parts = [part.strip(" $") for part in OR.split(text)]
    found = [interval(part) for part in parts]
    sets = [each for each in found if each]
    if len(parts) < 2 or len(sets) < len(parts) or all(each.startswith(r"\{") for _, each in sets):
        return text
    return r"\cup ".join(each for _, each in sets) if len({name for name, _ in sets} - {""}) < 2 else text


def interval(part: str) -> tuple[str, str] | None:
    """(unknown, its interval or set in TeX) of an inequality, an equation or an interval; None for anything else."""
    if found := INTERVAL.fullmatch(part):
        return found[1] or "", found[2]
    terms = [term.strip() for term in RELATION.split(part)]
    unknown = next((index for index in (0, 2) if index < len(terms) and UNKNOWN.fullmatch(terms[index])), None)
    if unknown is None or len(terms) not in (3, 5) or (len(terms) == 5 and unknown != 2):
        return None
    if terms[1] == "=" and len(terms) == 3:
        return terms[unknown], rf"\{{{terms[2 - unknown]}\}}"
    lower, upper = r"(-\infty", r"\infty)"
    for at, sign in ((unknown - 2, unknown - 1), (unknown + 2, unknown + 1)):
        if 0 <= at < len(terms):
            is_less, is_closed = terms[sign].strip("\\")[0] in "<l", terms[sign].strip("\\")[1:2] in ("=", "e")
            if is_less == (at < unknown):
                lower = ("[" if is_closed else "(") + terms[at]
            else:
                upper = terms[at] + ("]" if is_closed else ")")
    return terms[unknown], f"{lower}, {upper}"
