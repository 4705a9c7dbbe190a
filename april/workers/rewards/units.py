"""Units of measurement after, or currencies before, a mathematical answer.

`math` compares two answers that both have a unit in that unit: 90 minutes are 1.5 hours, and 5 hours are not 5 minutes.
If only one answer has a unit, just the numbers are compared.
"""

import re
from collections import Counter
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple


class Measured(NamedTuple):
    """An answer in two parts: its value, and the unit after or before it."""

    value: str
    factor: Fraction
    """Size of the unit in base units of its quantity, such as 60 for a minute."""
    dimension: frozenset[tuple[str, int]]
    """(quantity, exponent) pairs of the unit; empty if the answer only counts things."""
    counted: frozenset[str] = frozenset()
    """Words for the things counted, such as apples."""
    certain: bool = True
    """Whether the unit is surely meant as one; False for a letter that may as well be a variable, as in 3s."""

    def contradicts(self, other: "Measured") -> bool:
        """Whether the units differ in kind. Answers that count things differ in kind if they have no word in common."""
        if self.counted and other.counted and not (self.dimension and other.dimension):
            return self.counted.isdisjoint(other.counted)
        return bool(self.dimension and other.dimension) and self.dimension != other.dimension

    def in_base_units(self) -> str:
        """TeX of the value converted to base units: the value times `factor`, the unit's size in base units."""
        value = DECIMAL.sub(exact, THOUSANDS.sub("", self.value.rpartition("=")[2]))
        return rf"\left({value}\right)\cdot\frac{{{self.factor.numerator}}}{{{self.factor.denominator}}}"


THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
DECIMAL = re.compile(r"(?<![\d.])(\d*)\.(\d+)")


def exact(decimal: re.Match[str]) -> str:
    """TeX of a decimal number as a fraction, so that nothing is rounded. `decimal`: a match of `DECIMAL`."""
    return rf"\frac{{{int(decimal[1] + decimal[2])}}}{{{10 ** len(decimal[2])}}}"


TABLE = """
length: 1 m meter metre; 1000 km kilometer kilometre; 1/10 dm decimeter; 1/100 cm centimeter centimetre
length: 1/1000 mm millimeter millimetre; 1/1000000 micrometer micron; 1/1000000000 nm nanometer
length: 0.3048 ft foot feet; 0.0254 in inch inches; 0.9144 yd yard; 1609.344 mi mile
time: 1 s sec second; 60 min minute; 3600 h hr hour; 86400 day; 604800 wk week; 1/1000 ms millisecond
calendar: 1 mo month; 12 yr year
mass: 1 kg kilogram; 1/1000 g gm gram; 1/1000000 mg milligram; 1000 t ton tonne; 0.45359237 lb pound
mass: 0.028349523125 oz ounce
volume: 1/1000 L l liter litre; 1/1000000 mL ml milliliter millilitre
volume: 0.003785411784 gal gallon; 0.000946352946 qt quart; 0.000473176473 pt pint; 0.0002365882365 cup
frequency: 1 Hz hz hertz; 1000 kHz; 1000000 MHz; 1000000000 GHz
force: 1 N newton; 1000 kN
energy: 1 J joule; 1000 kJ kilojoule
power: 1 W watt; 1000 kW kilowatt; 1000000 MW megawatt
pressure: 1 Pa pascal; 1000 kPa kilopascal
charge: 1 C coulomb
current: 1 A amp ampere; 1/1000 mA
voltage: 1 V volt; 1000 kV; 1/1000 mV
resistance: 1 ohm
amount: 1 mol mole
kelvin: 1 K kelvin
Celsius: 1 celsius
Fahrenheit: 1 fahrenheit
radian: 1 rad radian
dollar: 1 dollar usd buck; 1/100 cent
euro: 1 euro eur
sterling: 1 gbp
rupee: 1 rupee
yuan: 1 yuan rmb
"""
"""Table of units, a quantity in each line: for each of its units the size in base units, then its spellings."""
UNITS: dict[str, tuple[Fraction, str]] = {
    spelling: (Fraction(size), name)
    for name, units in (line.split(":") for line in TABLE.strip().splitlines())
    for size, *spellings in map(str.split, units.split(";"))
    for spelling in spellings
}
"""Spelling of a unit -> (its size in base units, its quantity)."""
DERIVED = {
    "volume": {"length": 3},
    "frequency": {"time": -1},
    "force": {"mass": 1, "length": 1, "time": -2},
    "pressure": {"mass": 1, "length": -1, "time": -2},
    "energy": {"mass": 1, "length": 2, "time": -2},
    "power": {"mass": 1, "length": 2, "time": -3},
    "charge": {"current": 1, "time": 1},
}
"""Quantity -> exponents of the quantities that it is made of."""
COMPOUND = {"mph": "mile/hour", "kph": "km/hour", "kmh": "km/hour", "fps": "feet/second", "sq": "square",
            "cu": "cubic"}  # fmt: skip
POWERS = {"square": 2, "cubic": 3, "squared": 2, "cubed": 3}
CURRENCIES = {"$": "dollar", "\N{EURO SIGN}": "euro", "\N{POUND SIGN}": "gbp"}
NUMERALS = {"hundred", "thousand", "million", "billion", "trillion", "dozen", "half", "percent", "degree", "th", "st"}
NO_UNITS = NUMERALS | {
    "if",
    "and",
    "or",
    "when",
    "for",
    "mod",
    "where",
    "base",
    "only",
    "undefined",
    "none",
    "not",
    "to",
}
"""Words after a number that are no unit, but change what the answer says, such as "if" and "mod"."""
VAGUE = {"unit", "square", "cubic", "total", "different", "distinct", "of", "in", "the", "possible", "people", "person",
         "item", "object", "thing", "child", "children", "kid", "piece"}  # fmt: skip
"""Words that tell nothing about the things counted, such as "total" and "item"."""

FONT = re.compile(
    r"(?:\\(?:text\w*|math(?:rm|bf|sf|it|tt)|[mh]box|operatorname)\s*\{|\{\\rm\b)((?:[^{}]|\{[^{}]*\})*)\}"
)
SPACE = r"\\[,;:! ]|~|\s"
PIECE = rf"{FONT.pattern}|[A-Za-z]++\.?|\^\{{?-?\d\}}?|\^\{{?\\circ\}}?|[\xb0\xb2\xb3\xb7/*]|\\(?:cdot|Omega)(?![a-z])"
MEASURED = re.compile(
    rf"(?P<value>.*?(?:[\d)}}\]!.]|\\pi|(?<![\\a-zA-Z])[a-zA-Z]{{1,2}}(?=\s*\\)))(?P<unit>(?!\s*\^\{{?-?\d)(?:{PIECE}|{SPACE})+)",
    re.DOTALL,
)
"""Regular expression for an answer that ends with what may be a unit."""
AMOUNT = re.compile(
    r"(?:[^=]*=)?(?:[eE](?=[+-]?\d)|[\d\s.,/{}()\[\]^+*!-]|\\[,;:! ]"
    r"|\\(?:[dt]?frac|sqrt|pi|cdot|times|left|right)(?![a-z]))*"
)
"""Regular expression for a number in TeX. Letters after it may be a unit even if they are not marked as text."""
UNIT_FRACTION = re.compile(rf"\\[dt]?frac\s*\{{\s*{FONT.pattern}\s*\}}\s*\{{\s*{FONT.pattern}\s*\}}")
SUM = re.compile(r"[^\s{^(eE=]\s*[+-]")
PRICE = re.compile(r"\\?(?P<sign>[$\u20ac\u00a3])(?P<value>[^$\u20ac\u00a3]*\d[^$\u20ac\u00a3]*)")
COMMAND = re.compile(r"\\[a-zA-Z]")
SUMMAND = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)")
SUMMANDS = re.compile(rf"\s*{SUMMAND.pattern}(?:(?:\s|,|\\[,;: ]|\band\b)*{SUMMAND.pattern})+\s*")
"""Regular expression for several numbers with their units in a row, such as 1 hour 30 minutes."""
LONGEST = 200
"""Longest answer in which a unit is looked for (characters)."""
BEHIND_BOX = re.compile(r"[,;!?\n$]|\.(?=\s|$)|\\[)\]]")
"""Regular expression for the end of a formula or clause. A unit of a boxed number is looked for only between the box
and the first match behind the box."""
TOKEN = re.compile(r"[A-Za-z]+|\^-?\d|/")
SPELLINGS = (
    (re.compile(r"[{}]"), ""),
    (re.compile(r"\^?\\circ|\u00b0"), " degree "),
    (re.compile(r"(?i)\bdegrees?\s+c(?:elsius)?\b"), " celsius "),
    (re.compile(r"(?i)\bdegrees?\s+f(?:ahrenheit)?\b"), " fahrenheit "),
    (re.compile(r"\\Omega"), " ohm "),
    (re.compile("\u00b2"), "^2"),
    (re.compile("\u00b3"), "^3"),
    (re.compile(rf"{SPACE}|\\cdot"), " "),
    (re.compile(r"(?i)\bper\b"), "/"),
)


@lru_cache(maxsize=10_000)
def measured(answer: str) -> Measured | None:
    """An answer divided into its value and unit; None if it has no known unit."""
    answer = answer.strip().rstrip(".").strip()
    if len(answer) > LONGEST:
        return None
    if answer.count("$") - answer.count("\\$") == 2:
        answer = re.sub(r"(?<!\\)\$", "", answer).strip()
    answer = UNIT_FRACTION.sub(r"\\text{\1/\2}", answer.replace(r"\text{\$}", r"\$"))
    if inside := FONT.fullmatch(answer):
        answer = inside[1].strip()
    if (price := PRICE.fullmatch(answer)) and AMOUNT.fullmatch(price["value"]):
        return of_unit(price["value"], CURRENCIES[price["sign"]])
    if together := sum_of_units(answer):
        return together
    found = MEASURED.fullmatch(answer)
    if not found:
        return None
    value, unit = found["value"], FONT.sub(r" \1 ", found["unit"])
    is_bare = bool(re.search("[A-Za-z]", FONT.sub("", found["unit"]).replace(r"\circ", "").replace(r"\cdot", "")))
    if is_bare and (SUM.search(value) or not AMOUNT.fullmatch(value)):
        return None
    for pattern, replacement in SPELLINGS:
        unit = pattern.sub(replacement, unit)
    is_attached = is_bare and not unit[:1].isspace()
    words = [singular(word.lower()) for word in re.findall("[A-Za-z]+", unit)]
    try:
        result = of_unit(value, unit)
    except KeyError:
        if is_attached or not words or not NO_UNITS.isdisjoint(words) or (is_bare and min(map(len, words)) < 3):
            return None
        return unit_and_things(value, unit, words)
    is_speed = set(result.dimension) >= {("length", 1)} and "/" in unit
    is_letter = is_bare and max(map(len, words)) == 1 and not is_speed
    return result._replace(certain=not is_letter or not (is_attached or COMMAND.search(value)))


def sum_of_units(answer: str) -> Measured | None:
    """An answer in several units of one quantity, such as 1 hour 30 minutes, in the smallest of them; None for any
    other."""
    text = FONT.sub(r" \1 ", answer)
    if not SUMMANDS.fullmatch(text):
        return None
    try:
        parts = [of_unit(value, unit) for value, unit in SUMMAND.findall(text)]
    except KeyError:
        return None
    sizes = [part.factor for part in parts]
    if len({part.dimension for part in parts}) > 1 or not parts[0].dimension or sizes != sorted(set(sizes))[::-1]:
        return None
    total = sum(Fraction(part.value) * part.factor for part in parts) / sizes[-1]
    return parts[-1]._replace(value=rf"\frac{{{total.numerator}}}{{{total.denominator}}}")


def unit_and_things(value: str, unit: str, words: list[str]) -> Measured:
    """A value with its unit; the `words` after the unit, as in 5 km north, become `counted`. If no unit is known, all
    words do. `unit`: the text of unit and words."""
    parts = unit.split()
    for count in range(len(parts) - 1, 0, -1):
        if "in" not in parts[:count]:
            try:
                result = of_unit(value, " ".join(parts[:count]))
            except KeyError:
                continue
            return result._replace(counted=frozenset(words[count:]) - VAGUE)
    return Measured(value, Fraction(1), frozenset(), frozenset(words) - VAGUE)


def of_unit(value: str, unit: str) -> Measured:
    """A value with a unit such as `km/h`, `square meters` or `m s^-1`. Raises KeyError for an unknown one."""
    unit = re.sub(r"[A-Za-z]+", lambda word: COMPOUND.get(word[0].lower(), word[0]), unit)
    factor, dimension, sign, power, last = Fraction(1), Counter[str](), 1, 1, ""
    for token in TOKEN.findall(unit):
        if token == "/":
            sign = -1
        elif token in ("square", "cubic"):
            power = POWERS[token]
        elif token in POWERS or token.startswith("^"):
            exponent = POWERS.get(token) or int(token[1:])
            factor *= size_of(last, dimension, sign * (exponent - 1))
        else:
            last = token if token in UNITS else singular(token.lower())
            factor, power = factor * size_of(last, dimension, sign * power), 1
    size_of(last, dimension, 0)
    return Measured(value, factor, frozenset(item for item in dimension.items() if item[1]))


def size_of(unit: str, dimension: Counter[str], exponent: int) -> Fraction:
    """Size in base units of `unit` to the power `exponent`; adds the exponents of the unit's quantities to `dimension`.
    Raises KeyError for an unknown unit."""
    size, name = UNITS[unit]
    for base, each in DERIVED.get(name, {name: 1}).items():
        dimension[base] += each * exponent
    return size**exponent


def singular(word: str) -> str:
    if word.endswith("ches"):
        return word.removesuffix("es")
    return word if word in UNITS or len(word) < 3 else word.removesuffix("s")


def unit_behind(value: str, text: str) -> Measured | None:
    """The value with the unit that follows the value's last occurrence in a text; None without a unit."""
    _, found, behind = text.rpartition(value)
    words = re.split(r"(?<=\S)(?=\s)", re.split(r"[,;!?\n$]|\.(?=\s|$)", behind)[0])[:4] if found and value else []
    tries = (measured(value + "".join(words[:count])) for count in range(len(words), 0, -1))
    return next((unit for unit in tries if unit and unit.dimension), None)


def with_unit(answer: str, behind: str) -> str:
    """`answer`, the content of a box, followed by its unit if it is a number and `behind`, the text after the box,
    begins with a unit; otherwise `answer` alone."""
    if not AMOUNT.fullmatch(answer):
        return answer
    words = re.split(r"\bin\b", BEHIND_BOX.split(behind.lstrip(" $*"), maxsplit=1)[0])[0].split()
    texts = (" ".join([answer, *words[:count]]) for count in range(min(len(words), 3), 0, -1))
    return next((text for text in texts if (unit := measured(text)) and unit.dimension), answer)


DEGREES = re.compile(
    r"(?P<value>.+?) {0,3}(?:\^ {0,3}\{? {0,3}\\circ {0,3}\}?|\xb0|(?:\\text {0,3}\{)? {0,3}degrees? {0,3}\}?)"
)
"""Regular expression for an angle in degrees."""
RADIANS = re.compile(r"(?P<value>.*(?:\\pi|\bpi|\u03c0).*?)\s*(?:\\text\s*\{\s*rad(?:ians?)?\s*\}|rad(?:ians?)?)?")
"""Regular expression for an angle that is a part of pi."""


def in_radians(label: str, answer: str) -> tuple[str, str] | None:
    """Label and answer in radians, in TeX, if one of them is in degrees and the other a part of pi; otherwise None."""
    texts = [text.strip(" $") for text in (label, answer)]
    degrees, radians = [DEGREES.fullmatch(text) for text in texts], [RADIANS.fullmatch(text) for text in texts]
    for one, other in ((0, 1), (1, 0)):
        angle, part = degrees[one], radians[other]
        if angle and part and not degrees[other] and AMOUNT.fullmatch(angle["value"]) and "pi" not in angle["value"]:
            converted = rf"\left({angle['value']}\right)\cdot\frac{{\pi}}{{180}}", part["value"]
            return converted if one == 0 else converted[::-1]
    return None
