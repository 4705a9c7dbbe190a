"""Congruences: answers that are numbers up to a multiple of another one."""

import re
from typing import NamedTuple

CONGRUENCE = re.compile(
    r"(?:[a-zA-Z]\s*(?:\\equiv(?![a-zA-Z])|\u2261|=)\s*)?(?P<residues>-?\d+(?:\s*,\s*-?\d+)*)\s*"
    r"(?:\\pmod|\\bmod|\\mod|\(\s*(?:\\?mod(?![a-zA-Z])|\\(?:text|mathrm)\s*\{\s*mod\s*\})|mod(?![a-zA-Z])"
    r"|\\(?:text|mathrm)\s*\{\s*mod\s*\})"
    r"(?:\s|\\[,;: ])*\{?\s*(?P<modulus>\d+)\s*\}?\s*\)?"
)
INTEGERS = re.compile(r"(?:[a-zA-Z]\s*=\s*)?(-?\d+(?:\s*,\s*-?\d+)*)")


class Congruence(NamedTuple):
    residues: frozenset[int]
    """Each from 0 to the modulus - 1."""
    modulus: int


def congruence_of(text: str) -> Congruence | None:
    """The congruence that a text is, such as 3 mod 7; None for any other text."""
    found = CONGRUENCE.fullmatch(text.strip(" $."))
    if not found or not (modulus := int(found["modulus"])):
        return None
    return Congruence(frozenset(int(each) % modulus for each in found["residues"].split(",")), modulus)


def compared_congruences(label: str, answer: str) -> bool | None:
    """Whether two answers are equal, if one of them is a congruence; None if none is. One without the modulus has to be
    the least residue that is not negative."""
    wanted, given = congruence_of(label), congruence_of(answer)
    if wanted and given:
        return wanted == given
    known, number = wanted or given, answer if wanted else label
    if not known:
        return None
    plain = INTEGERS.fullmatch(number.strip(" $."))
    return plain is not None and known.residues == {int(each) for each in plain[1].split(",")}
