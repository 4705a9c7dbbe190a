"""Comparisons of two answers before their numbers are compared: opposite words, units, brackets, congruences."""

import re
from typing import NamedTuple

from april.workers.rewards.units import measured

OPPOSITES = tuple(
    frozenset(words.split())
    for words in (
        "increase decrease", "increasing decreasing", "increased decreased", "profit loss", "gain loss", "ago later",
        "before after", "early late", "earlier later", "above below", "up down", "left right", "bc ad", "more less",
        "more fewer", "least most", "minimum maximum", "even odd", "north south", "north east", "north west",
        "south east", "south west", "east west", "clockwise counterclockwise", "clockwise anticlockwise",
        "positive negative", "faster slower", "older younger", "taller shorter", "heads tails", "boy girl",
        "boys girls", "man woman", "men women", "hot cold", "inside outside", "upward downward", "upstream downstream",
    )
)  # fmt: skip
"""Pairs of words that say the opposite of each other, or another direction."""
WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]+")
CONDITION = re.compile(r"\b(?:or\s+(?:more|less|fewer)|if)\b")
"""Regular expression for words after a number that turn it into a bound ("or more") or make it conditional ("if")."""
COMPASS = re.compile(r"(?:\\circ|\xb0|degrees?)\W*(?:\\text\s*\{\s*)?([NSEW])\b")
DEGREE = re.compile(r"\^\s*\{?\s*\\circ|\xb0|\bdegrees?\b")
PERCENT = re.compile(r"%|\bpercent\b")
SET = re.compile(r"\\\{[^|<>(\[]*,[^|<>(\[]*\\\}")
TUPLE = re.compile(r"\((?:[^()\[\]]|\([^(),]*\))*,.*\)")
SIZES = re.compile(r"\\(?:left|right)(?![a-z])|[\s$]")


def are_opposed(label: str, answer: str) -> bool:
    """Whether two answers are unequal whatever their numbers are: one has the opposite word or direction of the other,
    another condition, another kind of unit (`kind_of`), or is a tuple where the other is a set."""
    words = [{word.lower() for word in WORD.findall(text)} for text in (label, answer)]
    if have_opposites(*words) or sorted(CONDITION.findall(label)) != sorted(CONDITION.findall(answer)):
        return True
    directions = [COMPASS.findall(text) for text in (label, answer)]
    if directions[0] != directions[1]:
        return True
    kinds = [kind_of(text) for text in (label, answer)]
    if all(kinds) and kinds[0] != kinds[1]:
        return True
    bare = [SIZES.sub("", text) for text in (label, answer)]
    return any(SET.fullmatch(one) and TUPLE.fullmatch(other) for one, other in (bare, bare[::-1]))


def have_opposites(one: set[str], other: set[str]) -> bool:
    """Whether the two sets hold different words of the same pair of OPPOSITES, such as "left" and "right"."""
    pairs = ((pair & one, pair & other) for pair in OPPOSITES)
    return any(first and second and first.isdisjoint(second) for first, second in pairs)


def kind_of(text: str) -> str:
    """Kind of an answer: "unit" if it has a known unit, "percent" or "degree" if it is marked as such; "" for a plain
    number or other text."""
    if (unit := measured(text)) and unit.dimension and unit.certain:
        return "unit"
    return "percent" if PERCENT.search(text) else "degree" if DEGREE.search(text) else ""


# --- congruences ------------------------------------------------------------------------------------------------------

CONGRUENCE = re.compile(
    r"(?:[a-zA-Z]\s*(?:\\equiv(?![a-zA-Z])|\u2261|=)\s*)?(?P<residues>-?\d+(?:\s*,\s*-?\d+)*)\s*"
    r"(?:\\pmod|\\bmod|\\mod|\(\s*(?:\\?mod(?![a-zA-Z])|\\(?:text|mathrm)\s*\{\s*mod\s*\})|mod(?![a-zA-Z])"
    r"|\\(?:text|mathrm)\s*\{\s*mod\s*\})"
    r"(?:\s|\\[,;: ])*\{?\s*(?P<modulus>\d+)\s*\}?\s*\)?"
)
INTEGERS = re.compile(r"(?:[a-zA-Z]\s*=\s*)?(-?\d+(?:\s*,\s*-?\d+)*)")


class Congruence(NamedTuple):
    residues: frozenset[int]
    """Residues, each from 0 to the modulus - 1."""
    modulus: int


def congruence_of(text: str) -> Congruence | None:
    """The congruence that a text states, such as 3 mod 7; None for any other text."""
    found = CONGRUENCE.fullmatch(text.strip(" $."))
    if not found or not (modulus := int(found["modulus"])):
        return None
    return Congruence(frozenset(int(each) % modulus for each in found["residues"].split(",")), modulus)


def compared_congruences(label: str, answer: str) -> bool | None:
    """Whether two answers are equal, if one of them is a congruence; None if none is. A plain number equals a
    congruence only if it is the least residue that is not negative."""
    wanted, given = congruence_of(label), congruence_of(answer)
    if wanted and given:
        return wanted == given
    known, number = wanted or given, answer if wanted else label
    if not known:
        return None
    plain = INTEGERS.fullmatch(number.strip(" $."))
    return plain is not None and known.residues == {int(each) for each in plain[1].split(",")}
