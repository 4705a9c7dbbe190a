"""Verifiers that compare text: exact, regular expression, token F1, multiple choice, GSM8K, the quickstart's task."""

import re
import string
from collections import Counter
from decimal import Decimal
from itertools import pairwise

from april.util.text import final_number, last_number, leading_number
from april.workers.rewards.messages import right_or_wrong

# --- answers in a response --------------------------------------------------------------------------------------------

END_OF_THINKING = "</think>"
BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
"""Regular expression for a character after a backslash, or for a brace: braces after a backslash are not counted."""


SPECIAL_TOKEN = re.compile(r"<[|\uff5c][^|\uff5c<>]{1,40}[|\uff5c]>|</?s>|<eos>|<(?:start|end)_of_turn>")
"""Regular expression for a special token that begins or ends a text or a turn."""
END_TOKEN = re.compile(rf"(?:{SPECIAL_TOKEN.pattern})\s{{0,8}}\Z")
END_TOKEN_CHARACTERS = 60
"""Maximum number of characters of an end token with the white space after it."""


def without_end(response: str) -> str:
    """The response without the end tokens that it may still have at its end."""
    end = len(response)
    while found := END_TOKEN.search(response, max(0, end - END_TOKEN_CHARACTERS), end):
        end = found.start()
    return response[:end]


def in_lines(response: str) -> str:
    """The response with a line break in place of each special token between its turns."""
    return SPECIAL_TOKEN.sub("\n", response)


def after_thinking(response: str) -> str:
    """The text after the last `</think>`, without end tokens; the whole response if there is no such mark."""
    return without_end(response.rpartition(END_OF_THINKING)[2])


def boxes(text: str) -> list[tuple[int, int, str]]:
    """(start, end, content) of each complete `\\boxed{}` with no other one inside; braces may be nested and escaped.

    Takes linear time, however many boxes are never closed.
    """
    openings = {opening.end() - 1: opening.start() for opening in BOX.finditer(text)}
    opened: list[int] = []
    found: list[tuple[int, int, str]] = []
    for brace in BRACE.finditer(text) if openings else ():
        if brace[0] == "{":
            opened.append(brace.start())
            continue
        start = openings.get(opened.pop(), -1) if brace[0] == "}" and opened else -1
        if start > (found[-1][0] if found else -1):
            inside = text.index("{", start) + 1
            found.append((start, brace.end(), text[inside : brace.start()].strip()))
    return found


def last_boxed(text: str) -> str | None:
    """The content of the last complete `\\boxed{}`; None if there is none."""
    found = boxes(text)
    return found[-1][2] if found else None


def after_phrase(text: str, phrase: str) -> str | None:
    """The rest of the line after the last `phrase:`, case-insensitive; None if there is none."""
    found = re.findall(rf"(?i){phrase}\s*:\s*([^\n]+)", text)
    return found[-1].strip() if found else None


# --- verifiers --------------------------------------------------------------------------------------------------------

ARTICLES = re.compile(r"\b(a|an|the)\b")
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
FONT = re.compile(r"\\(?:text\w*|math[a-z]+|operatorname|boldsymbol|bold|[mhf]box|left|right|rm|bf|it)(?![a-zA-Z])")
LETTER = r"(?:\W*?([A-Z])\b(?!')(?!(?<=I)\s+[a-z])|\W*?\b([a-z])(?=\s*\W*(?:\n|$)|[.,;)]))"
"""Regular expression for a letter that stands by itself: a capital, but not the "I" of "I'm" or "I think"; or a small
one that ends its line or clause."""
NOUN = r"(?i:choice|option|selection|letter|pick)"
SURELY = (
    r"(?:\s+(?:then|thus|therefore|hence|(?:most\s+)?likely|probably|definitely|clearly|obviously|certainly|indeed))*"
)
"""Regular expression for adverbs before or after "be". Its repetitions are not possessive, since Python before 3.11.5
then misses matches."""
MODAL = (
    r"(?:must|should|ought\s+to|may|might|will|would(?:\s+have\s+to)?|(?:has|had|have)\s+(?:got\s+)?to|"
    rf"(?:can|could)\s+only|(?:seems?|appears?)\s+to){SURELY}\s+be{SURELY}"
)
IS = rf"(?:{MODAL}|is{SURELY}|would{SURELY}\s+be)"
"""Regular expression for "is", "must be", "should therefore be" and the like."""
REJECTED = r"(?:\s+(?i:not)\b[^.\n]{1,40}?\b(?i:but)(?:\s+(?i:rather))?\b)?"
"""Regular expression for a choice that is rejected before the chosen one, as in "not A but B"."""
ENDING = r"(?=\W*(?:\n|$)|\W{0,3}[.,;)]|\W*\s(?:because|since|as)\b)"
"""Regular expression for what follows a letter that ends its clause."""
CHOICE_PHRASES = tuple(
    re.compile(phrase)
    for phrase in (
        rf"\b(?i:answer)(?:\W*(?i:{IS}))?{REJECTED}(?:\W*(?i:the\s+)?{NOUN}(?:\s+(?i:{IS}))?)?{LETTER}",
        rf"\b{NOUN}(?:(?i:\s+{IS}){REJECTED}|\W*?:){LETTER}",
        rf"\b(?i:(?:choose|pick|select|go\s+with)(?:\s+(?:answer|choice|option))?){LETTER}",
        rf"\b(?i:{MODAL}|(?:it|this|that|one|solution|guess)(?:\s+{IS}|['\u2019]s)|leaves(?:\s+us\s+with)?|left\s+with|"
        rf"corresponds\s+to|matches|I['\u2019]d\s+say)\W{{1,3}}(?:(?i:the\s+)?{NOUN}\W{{1,3}})?([A-Z])\b{ENDING}",
        rf"(?<![\w'])([A-Z])\b\W{{0,4}}\s(?i:{IS}\s+(?:the\s+)?(?:only\s+)?(?:correct|right|best|answer|one)\b|it\s+is\b|"
        r"fits\s+best\b)",
        rf"\b(?i:therefore|thus|hence|so)\b\W{{1,3}}(?:(?i:the\s+)?{NOUN}\W{{1,3}})?([A-Z])\b(?=\W*(?:\n|$)|[.,;)])",
        rf"(?<![\w'])([A-Z])\b\W{{0,4}}\s(?i:{IS}\s+true\b)",
        r"(?:答案|选项|选择|应选|故选|选)(?:是|为|应为|应该是)?\W{0,3}([A-Z])(?![A-Za-z])",
    )
)
SUPPOSED = (3, 6)
"""Indexes of the weak phrases in CHOICE_PHRASES, such as "it would be" and "B is true". They count only if no other
phrase of CHOICE_PHRASES states a choice."""
HEDGE = re.compile(r"[\s$*)]*(?:/|(?:or|and)\b)[\s$*(]*[A-Z](?![\w'])(?!\s+(?:is|are|was)\b)")
"""Regular expression for another letter after the chosen one, as in "B or C"."""
BETWEEN_CHOICES = re.compile(r"[\s$]*\bor\b[\s$]*")
"""Regular expression for what stands between two boxes that are alternatives."""
LISTED = re.compile(r"^\W*([A-Z])[.):]\W*\s\S")
"""Regular expression for a line that is a choice with its text, as in "B) 12"."""
LONE_CHOICE = re.compile(rf"^\W*(?:{NOUN}\W+)?([A-Z])\W*$")


@right_or_wrong
def final_answer(response: str, label: str, finish_reason: str) -> float:
    """1.0 iff the response ended with a stop token and the text after its first `#` is the label."""
    _, mark, answer = response.partition("#")
    return float(finish_reason == "stop" and mark == "#" and label in (answer, without_end(answer)))


@right_or_wrong
def exact(response: str, label: str, finish_reason: str) -> float:
    """1.0 iff the response ended with a stop token and equals the label."""
    return float(finish_reason == "stop" and label in (response, without_end(response)))


@right_or_wrong
def regex(response: str, label: str, finish_reason: str) -> float:
    """1.0 iff the label, a regular expression, matches in the text after the reasoning.

    Raises ValueError for an empty label, which would match everything.
    """
    if not label:
        raise ValueError("label '' is found in every response")
    return float(re.search(label, after_thinking(response)) is not None)


def f1(response: str, label: str, finish_reason: str) -> tuple[float, dict[str, float]]:
    """F1 score of the words of answer and label, ignoring case, punctuation and articles (as in SQuAD)."""
    text = in_lines(after_thinking(response))
    boxed = last_boxed(text)
    found, wanted = normalised_words(text if boxed is None else boxed), normalised_words(label)
    common = sum((Counter(found) & Counter(wanted)).values())
    precision, recall = common / max(1, len(found)), common / max(1, len(wanted))
    score = 2 * precision * recall / (precision + recall) if common else float(found == wanted)
    return score, {"precision": precision, "recall": recall}


def normalised_words(text: str) -> list[str]:
    return ARTICLES.sub(" ", text.lower().translate(NO_PUNCTUATION)).split()


@right_or_wrong
def choice(response: str, label: str, finish_reason: str) -> tuple[float, dict[str, float]]:
    """1.0 iff the chosen letter is the label's.

    The chosen letter is in a box, in the last phrase that states a choice ("the answer is", "my choice is", "I choose",
    "is correct"), or alone on the last line. Raises ValueError for a label without a letter.
    """
    wanted = LONE_CHOICE.match(FONT.sub("", label).upper())
    if not wanted:
        raise ValueError(f"label {label[:80]!r} is no letter")
    chosen = chosen_letter(in_lines(after_thinking(response)))
    return float(chosen == wanted[1]), {"answered": float(chosen is not None)}


def chosen_letter(text: str) -> str | None:
    """The letter that a response chooses, as a capital; None if it chooses none."""
    found_boxes = boxes(text)
    if found_boxes and (boxed := found_boxes[-1][2]):
        if any(BETWEEN_CHOICES.fullmatch(text, one[1], other[0]) for one, other in pairwise(found_boxes[-2:])):
            return None
        text = boxed
        if letter := re.match(r"\W*([A-Za-z])\b", FONT.sub("", boxed)):
            return letter[1].upper()
    text = FONT.sub("", text)
    choices = [
        (rank not in SUPPOSED, found.span(found.lastindex or 0), found)
        for rank, phrase in enumerate(CHOICE_PHRASES)
        for found in phrase.finditer(text)
    ]
    hedged = max((span for _, span, _ in choices if HEDGE.match(text, span[1])), default=None)
    if choices := [choice for choice in choices if hedged is None or choice[1] > hedged]:
        _, _, last = max(choices, key=lambda choice: choice[:2])
        return last[last.lastindex or 0].upper()
    lines = text.strip().splitlines()
    letter = LONE_CHOICE.match(lines[-1]) if lines else None
    if not letter and sum(LISTED.match(line) is not None for line in lines) == 1:  # more would be the choices
        letter = LISTED.match(lines[-1])
    return letter[1] if letter else None


@right_or_wrong
def gsm8k(response: str, label: str, finish_reason: str) -> tuple[float, dict[str, float]]:
    """1.0 iff the number after the last `####` equals the label. Raises ValueError for a label that is not a number.

    Published code has two rules: *strict*, the number after `####`, and *flexible*, the last number anywhere (`method`
    of verl's reward_score/gsm8k.py; `strict-match` and `flexible-extract` of lm-evaluation-harness's task gsm8k). This
    verifier rewards the strict one, as verl does by default: the prompt asks for the mark, and a last number can be
    right by accident. The flexible result is a detail; its difference from the reward shows how much is lost to the
    format alone. The dataset's own code (openai/grade-school-math, dataset.py) takes the first mark; here, as in verl,
    the last one counts, since `####` also begins a heading in Markdown. Numbers are compared by value: 18.00 is 18.
    """
    wanted = leading_number(label)
    if wanted is None:
        raise ValueError(f"label {label[:80]!r} is not a number")
    text = after_thinking(response)
    strict, flexible = final_number(text), last_number(text)
    details = {"marked": float(strict is not None), "flexible": float(equal_numbers(flexible, wanted))}
    return float(equal_numbers(strict, wanted)), details


def equal_numbers(answer: str | None, wanted: str) -> bool:
    return answer is not None and Decimal(answer) == Decimal(wanted)


EXAMPLES = (
    (final_answer, "#{}"), (exact, "{}"), (f1, "\\boxed{{{}}}"), (choice, "\\boxed{{{}}}"), (gsm8k, "#### {}"),
)  # fmt: skip
"""Pairs for verifiers of text: (verifier, template of a response that it scores as correct, in which {} stands for the
label)."""

for verifier, example in EXAMPLES:
    vars(verifier)["example"] = example.format
