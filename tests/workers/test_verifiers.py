"""The reward of each verifier, and the penalties."""

import importlib
import json
from pathlib import Path

import pytest

from april.config import ConfigError
from april.workers.rewards import VERIFIERS
from april.workers.rewards.mathematics import dapo, deepscaler, math, normalise
from april.workers.rewards.messages import Item, RewardRules, Score
from april.workers.rewards.process import preload, validated, verify
from april.workers.rewards.text import after_thinking, choice, exact, f1, final_answer, gsm8k, last_boxed, regex
from april.workers.rewards.verifiers import check_verifier
from tests.support.marks import full


@pytest.mark.parametrize(
    ("response", "label", "finish_reason", "reward"),
    [
        ("04*3+90=#12", "12", "stop", 1.0), ("#12", "12", "stop", 1.0), ("#12", "12", "length", 0.0),
        ("#13", "12", "stop", 0.0), ("#12 ", "12", "stop", 0.0), ("#13#12", "12", "stop", 0.0),
        ("12", "12", "stop", 0.0), ("", "", "stop", 0.0), ("#", "", "stop", 1.0),
    ],
)  # fmt: skip
def test_final_answer_is_the_text_after_the_first_mark_of_a_response_that_ended(response, label, finish_reason, reward):
    assert final_answer(response, label, finish_reason) == reward


ENDS = ("<|im_end|>", "<|eot_id|>\n", "</s></s>", "<end_of_turn>", "<\uff5cend\u2581of\u2581sentence\uff5c>")
TURN = "<|im_end|>\n<|im_start|>user\nThanks"
RIGHT = {
    "final_answer": ("6*7=#42", "42"), "exact": ("42", "42"), "regex": ("is 42", "is 42$"), "gsm8k": ("#### 42", "42"),
    "f1": ("forty two", "forty two"), "choice": ("I say\nB", "B"), "dapo": ("Answer: 42", "42"),
    "deepscaler": ("</think>\\boxed{42}", "42"), "math": ("The answer is 42.", "42"),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_answer_is_right_with_an_end_token_behind_it(name):
    response, label = RIGHT[name]
    for end in ENDS:
        [score] = verify([Item(0, name, response + end, label, "stop")], RewardRules())
        assert score.reward == 1, (end, score)


@pytest.mark.parametrize(
    ("name", "response", "label"),
    [
        ("math", "The answer is $x = 42$", "42"), ("dapo", "Answer: 42", "42"), ("choice", "the answer is b", "B"),
        ("gsm8k", "#### 42", "42"), ("code", "```python\nprint(1)\n```", '{"inputs": [""], "outputs": ["1"]}'),
    ],
)  # fmt: skip
def test_a_right_answer_is_right_before_another_turn(name, response, label):
    [score] = verify([Item(0, name, response + TURN, label, "stop")], RewardRules())
    assert score.reward == 1, score


def test_long_runs_of_end_tokens_and_white_space_take_linear_time():
    assert exact("4" + "<|im_end|>" * 100_000, "4", "stop") == 1
    assert exact("4" + " \n" * 100_000, "4", "stop") == 0


def test_exact_compares_the_whole_response():
    assert exact("yes", "yes", "stop") == 1.0
    assert exact("yes", "yes", "length") == exact("yes.", "yes", "stop") == 0.0


def test_regex_searches_what_follows_the_reasoning():
    assert regex("so x </think> It is 42.", r"\b4\d\b", "stop") == 1.0
    assert regex("maybe 42 </think> It is 7.", r"\b4\d\b", "stop") == 0.0


PAIRS = [json.loads(line) for line in Path(__file__).with_name("math_pairs.jsonl").read_text("utf-8").splitlines()]


@pytest.mark.parametrize(
    "pair",
    [full(pair) if number % 3 else pair for number, pair in enumerate(PAIRS)],
    ids=[f"{pair['response']} for {pair['label']}" for pair in PAIRS],
)
def test_an_answer_is_right_iff_it_is_equivalent_to_the_label_however_both_are_written(pair):
    assert math(pair["response"], pair["label"], "stop")[0] == pair["right"]


@pytest.mark.parametrize("label", ["x**2 +", "hello (world", r"\frac{1}{", "(lambda: 7)()", "Solve: x @ y"])
def test_a_label_that_cannot_be_read_whole_is_never_shrunk_to_its_last_number(label):
    with pytest.raises(ValueError, match="as mathematics"):
        math(r"\boxed{7}", label, "stop")


@pytest.mark.parametrize(
    ("response", "boxed"),
    [
        (r"\boxed{3}", "3"), (r"\boxed{1} and \boxed{2}", "2"), (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"), (r"\boxed{1} and \boxed{2", "1"), (r"\fbox{4}", "4"), (r"\boxed {5}", "5"),
        ("no box", None), (r"\boxed{", None), (r"\\boxed{6}", "6"), (r"{\boxed{7}", "7"), (r"} \boxed{8\}}", r"8\}"),
        (r"\boxed{9 \boxed{10}}", "10"), (r"\boxed{11 \boxed{12}", "12"),
    ],
)  # fmt: skip
def test_the_last_box_that_is_closed_counts(response, boxed):
    assert last_boxed(response) == boxed


def test_a_repetition_of_boxes_that_are_never_closed_is_read_in_one_pass():
    """Within the limit of the suite: in quadratic time it would take hours."""
    assert last_boxed(r"\boxed{3} " + r"\boxed{" * 100_000) == "3"
    assert last_boxed(r"\boxed{" * 100_000 + "}" * 100_000) == ""


def test_the_answer_is_behind_the_reasoning():
    assert after_thinking("a</think>b</think>c") == "c"
    assert after_thinking("all of it") == "all of it"


@pytest.mark.parametrize(
    ("answer", "label"),
    [
        ("12", "12"), ("12.0", "12"), (r"\frac{1}{2}", "0.5"), (r"\dfrac{1}{2}", r"\frac{1}{2}"),
        ("1/2", r"\frac{1}{2}"), (r"\frac12", "1/2"), (r"3\sqrt{2}", r"\sqrt{18}"), (r"12\text{ cm}", "12"),
        (r"90^\circ", "90"), (r"50\%", r"50\%"), (r"\{2, 1\}", r"\{1, 2\}"), (r"[0, 1) \cup (2, 3]", r"(2,3]\cup[0,1)"),
        (r"(1, \infty)", r"(1,\infty)"), ("x^2+2x+1", "(x+1)^2"), ("1,000", "1000"), ("(3, 4)", "(3,4)"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"), ("x = 5", "5"), ("36", r"\$36"),
        (r"\$36", "36"), ("18.9", r"\$18.90"), ("32348", r"\$32,\!348"), ("1234", r"\$1{,}234"), ("-5", r"-\$5"),
        ("36", r"36\$"), ("36", r"$\$36$"), ("36", "$36"), ("12345", r"12\,345"), (r"12\ 345", "12345"),
        ("12~345", r"12{,}345"), ("1\N{NARROW NO-BREAK SPACE}234\N{THIN SPACE}567.5", "1234567.5"),
        (r"\frac{1}{2}", r"\$\frac{1}{2}"),
    ],
)  # fmt: skip
def test_math_compares_meanings(answer, label):
    reward, details = math(f"<think>maybe 7</think> so it is \\boxed{{{answer}}}.", label, "stop")
    assert reward == 1.0 and details == {"boxed": 1.0}


@pytest.mark.parametrize(
    ("answer", "label"),
    [
        ("13", "12"),
        (r"\frac{1}{3}", "0.5"),
        ("(1, 2)", "[1, 2]"),
        (r"\{1, 2, 3\}", r"\{1, 2\}"),
        ("x^2", "x^3"),
        ("", "1"),
    ],
)
def test_math_tells_different_meanings_apart(answer, label):
    assert math(f"\\boxed{{{answer}}}", label, "stop")[0] == 0.0


def test_math_reads_the_answer_after_the_reasoning_and_not_inside_it():
    assert math(r"\boxed{12}</think>\boxed{13}", "12", "stop")[0] == 0.0
    assert math("The answer is $12$.", "12", "stop") == (1.0, {"boxed": 0.0})
    assert math("I do not know.", "12", "stop")[0] == 0.0


def test_a_boxed_answer_that_is_too_long_is_not_read_from_its_end():
    assert math(f"\\boxed{{{'1+' * 2000} = 12}}", "12", "stop")[0] == 0.0


@pytest.mark.parametrize(
    "answer",
    ["1" * 900 + " " * 900, "\\sin " + " " * 1900, " " * 1900 + "no", "1 000 " * 300],
    ids=["digits", "blanks in a formula", "blanks before a word", "groups of digits"],
)
def test_an_answer_of_repetitions_is_read_at_once(answer):
    """Within the limit of the suite: in cubic time each would take minutes."""
    assert math(f"\\boxed{{{answer}}}", "45^\\circ", "stop")[0] == 0.0


def test_a_label_that_is_not_mathematics_is_an_error():
    item = Item(0, "math", r"\boxed{1}", "", "stop")
    [score] = verify([item], RewardRules())
    assert score.reward is None and "label ''" in score.error


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        (r"so</think> \boxed{\frac{1}{2}}", 1.0),
        (r"###Response: \boxed{0.5}", 1.0),
        (r"\boxed{0.5}", 0.0),
        (r"\boxed{0.5}</think> that is it", 0.0),
        (r"so</think> it is 0.5", 0.0),
        (r"so</think> \boxed{0.6}", 0.0),
    ],
)
def test_deepscaler_needs_closed_reasoning_and_a_box_after_it(response, reward):
    assert deepscaler(response, "1/2", "stop")[0] == reward


def test_an_answer_with_more_brackets_than_are_parsed_is_wrong():
    found = [math(f"\\boxed{{{'(' * deep}5{')' * deep}}}", "5", "stop") for deep in (3, 60, 900)]
    assert [reward if isinstance(reward, float) else reward[0] for reward in found] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [
        ("Step 1...\nAnswer: 34", "34", 1.0), ("Answer: $34$", "34", 1.0), ("answer : 34.", "34", 1.0),
        ("Answer: \\boxed{34}", "34", 1.0), ("Answer: 1,234 units", "1234", 1.0), ("Answer: x = 34", "34", 1.0),
        ("Answer: 12\nAnswer: 34", "34", 1.0), ("Answer: 35", "34", -1.0), ("It is 34", "34", -1.0),
        ("Answer: 34" + " and so on" * 40, "34", -1.0), ("", "34", -1.0), (r"Answer: \$42", "42", 1.0),
        (r"Answer: $\$42$", "42", 1.0), ("Answer: 42", r"\$42", 1.0), ("Answer: 1{,}234", "1234", 1.0),
        ("Answer: 1{,}234{,}567", "1,234,567", 1.0), ("Answer: 42\\ ", "42", 1.0), (r"Answer: 1\,234", "1234", 1.0),
        (r"Answer: \(42\)", "42", 1.0), ("Answer:\n\\[ 42 \\]", "42", 1.0), ("Answer: \N{EN DASH}42", "-42", 1.0),
        ("Answer: 34", "034", 1.0), ("Answer: 034", "34", 1.0), ("Answer: 340", "34", -1.0),
        ("Answer: -034.50", "-34.5", 1.0), ("Answer: \N{MINUS SIGN}5", "-5", 1.0), ("Answer: .5", "0.5", 1.0),
        ("Answer: .5", "5", -1.0), ("Answer: +7", "7", 1.0), ("Answer: 100", "1", -1.0),
        ("Answer: square", "square", 1.0), ("Answer: square", "points", -1.0), ("Answer: ", "34", -1.0),
        ("Answer: units", "34", -1.0), ("Answer: 42,", "42", 1.0), ("Answer: 42<|im_end|>", "42", 1.0),
        ("Answer: 42 </s>", "42", 1.0), ("Answer: 43<|eot_id|>", "42", -1.0),
    ],
)  # fmt: skip
def test_dapo_gives_plus_or_minus_one_for_the_last_answer_line(response, label, reward):
    score, details = dapo(response, label, "stop")
    assert score == reward and details["correct"] == float(reward > 0)


@pytest.mark.parametrize("label", ["", " ", "$$", r"\$", "\\boxed{}"])
def test_an_empty_label_of_dapo_is_an_error(label):
    [score] = verify([Item(0, "dapo", "Answer: ", label, "stop")], RewardRules())
    assert score.reward is None and "is empty" in score.error


@pytest.mark.parametrize(
    ("answer", "plain"),
    [
        (r"\dfrac12", r"\frac{1}{2}"), (r"\sqrt 2", r"\sqrt{2}"), ("45^\\circ", "45"), ("3.00", "3"), ("50\\%", "50"),
        (r"\text{east}", "east"), ("10, 200", "10,200"), ("12 \\text{ dollars}", "12"),
    ],
)  # fmt: skip
def test_dapo_normalises_answers(answer, plain):
    assert normalise(answer) == plain


@pytest.mark.parametrize(
    ("response", "label"),
    [
        ("48/2 = <<48/2=24>>24\n48+24 = 72\n#### 72", "72"), ("#### 1,080", "1080"), ("#### 1080", "1,080"),
        ("#### 109,200,000", "109200000"), ("#### -5", "-5"), ("#### \N{MINUS SIGN}5", "-5"), ("#### -$5", "-5"),
        ("#### $-5", "-5"), ("#### +5", "5"), ("#### 0.25", "0.25"), ("#### .25", "0.25"), ("#### 18.00", "18"),
        ("#### $18", "18"), ("#### \\$18", "18"), ("#### 18.", "18"), ("#### 18 eggs a day", "18"),
        ("#### 15/hour", "15"), ("#### 50%", "50"), ("#### **18**", "18"), ("####18", "18"),
        ("#### 17\nNo, wait.\n#### 18", "18"), ("#### 18\n#### That was it", "18"),
        ("#### Step 1\n16-3 = 13\n#### Answer\n#### 18", "18"), ("<think>#### 3</think>#### 18", "18"),
    ],
)  # fmt: skip
def test_gsm8k_takes_the_number_after_the_last_mark(response, label):
    assert gsm8k(response, label, "stop")[0] == 1.0


@pytest.mark.parametrize(
    ("response", "label"),
    [
        ("#### 18", "17"), ("#### 5", "-5"), ("#### -5", "5"), ("#### 18\n#### 17", "18"), ("#### 1,080", "1"),
        ("#### 10.80", "1080"), ("#### 180", "18"), ("#### 1/2", "1"), ("#### 12/24", "1"), ("#### 10^3", "10"),
        ("#### eighteen", "18"), ("#### x = 18", "18"), ("####\n18", "18"), ("### 18", "18"),
        ("The answer is 18.", "18"), ("#### 18</think>I cannot say", "18"), ("", "0"),
    ],
)  # fmt: skip
def test_gsm8k_gives_zero_for_a_different_or_missing_number(response, label):
    assert gsm8k(response, label, "stop")[0] == 0.0


@pytest.mark.parametrize(
    ("response", "marked", "flexible"),
    [
        ("The answer is 18.", 0.0, 1.0),
        ("It is $1,018.00", 0.0, 0.0),
        ("#### 17 of 18", 1.0, 1.0),
        ("#### 18", 1.0, 1.0),
        ("#### 18, as 9 is half of it", 1.0, 0.0),
        ("none", 0.0, 0.0),
    ],
)
def test_gsm8k_reports_format_and_number_separately(response, marked, flexible):
    assert gsm8k(response, "18", "stop")[1] == {"marked": marked, "flexible": flexible}


def test_a_label_of_gsm8k_that_is_not_a_number_is_an_error():
    [score] = verify([Item(0, "gsm8k", "#### 1", "one", "stop")], RewardRules())
    assert score.reward is None and "label 'one' is not a number" in score.error


@pytest.mark.parametrize(
    "text",
    ["#### " + " " * 10**6, "####" * 10**5, "#### " + "1" * 10**6 + "/2", "*$" * 10**5],
    ids=["blanks", "marks", "digits", "dollars"],
)
def test_gsm8k_reads_a_hostile_response_in_linear_time(text):
    """Within the limit of the suite: in quadratic time each would take hours."""
    assert gsm8k(text, "1", "stop")[0] == 0.0


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("The answer is (C).", "C"), ("Answer: B", "B"), ("**Answer:** D", "D"), ("so\\boxed{A}", "A"),
        ("\\boxed{\\text{(B) 12}}", "B"), ("The answer is A</think>The answer is D", "D"), ("Let me see.\n(C)", "C"),
        ("the answer is a matter of taste", None), (r"\boxed{\mathrm{B}}", "B"), (r"\boxed{\mathbf{(C)}}", "C"),
        (r"\boxed{\left(D\right)}", "D"), (r"\boxed{\frac{A}{2}}", None), (r"Answer: \text{B}", "B"),
        ("The answer is option B", "B"), ("answer: b", "B"), ("Therefore B.", "B"), (r"\boxed{Answer: B}", "B"),
        ("答案: C", "C"), ("答案是C", "C"), ("Hence, C", "C"), ("the answer is d", "D"), ("the answer is a bit", None),
        ("Option A", "A"), ("Answer: a cat", None),
        (r"The answer is $\mathrm{C}$.", "C"), ("My choice is D", "D"), ("My final choice: D", "D"),
        ("The correct option is (B).", "B"), ("I choose C.", "C"),
        ("I would go with option A, as B is too small.", "A"), ("So B is the correct answer.", "B"),
        ("(D) is correct", "D"), ("Option A is wrong. I pick C", "C"), ("The answer is A. No, the answer is B.", "B"),
        ("Answer: I think it is late", None), ("Answer: I'm not sure", None), ("USA is the best", None),
        ("I cannot say", None), ("", None), ("So it must be D.", "D"), ("The answer should therefore be (B).", "B"),
        ("It cannot be A. It has to be C", "C"), ("C must be the right answer.", "C"), ("It must be a cat", None),
        ("The answer is clearly **A**", "A"), ("That leaves B.", "B"), ("The answer is not A.", None),
        ("Answer: C\n(If n is even, it would be B.)", "C"), ("Answer: B or C", None), ("Answer: B/C", None),
        (r"\boxed{A} or \boxed{B}", None), ("The answer is B and A is wrong.", "B"),
        ("The answer is A or B. It must be B.", "B"), ("The answer is not A but B.", "B"),
        ("The correct option is not (A), but rather (C).", "C"), ("So B is true.", "B"),
        ("A is true. The answer is D.", "D"), ("Let me see.\nB) 12", "B"), ("A) 10\nB) 12", None), ("B. Paris", "B"),
    ],
)  # fmt: skip
def test_choice_finds_the_letter_that_was_chosen(response, letter):
    for label in "ABCD":
        assert choice(response, label, "stop") == (float(label == letter), {"answered": float(letter is not None)})


@pytest.mark.parametrize("label", ["B", " b ", "(B)", "B.", r"\text{B}", "$B$"])
def test_a_label_of_choice_is_a_letter_in_any_formatting(label):
    assert choice("The answer is B", label, "stop")[0] == 1.0


@pytest.mark.parametrize(("verifier", "label"), [("choice", ""), ("choice", "12"), ("choice", "AB"), ("regex", "")])
def test_a_label_that_fits_every_response_or_none_is_an_error(verifier, label):
    [score] = verify([Item(0, verifier, "The answer is B", label, "stop")], RewardRules())
    assert score.reward is None and f"label {label!r}" in score.error


def test_f1_counts_the_common_words():
    assert f1("The Eiffel Tower", "eiffel tower!", "stop")[0] == 1.0
    assert f1("tall tower of Paris", "the tower", "stop")[0] == pytest.approx(0.4)
    assert f1("no", "yes", "stop")[0] == 0.0
    assert f1("why? </think> \\boxed{yes}", "yes", "stop")[0] == 1.0


# --- penalties ----------------------------------------------------------------------------------------------


def scored(tokens, response="#1", **rules):
    plain = RewardRules(over_limit="failed", **rules)
    [score] = verify([Item(0, "final_answer", response, "1", "stop", tokens=tokens)], plain)
    return score


@pytest.mark.parametrize(("tokens", "reward"), [(1, 1.0), (60, 1.0), (70, 0.875), (80, 0.75), (100, 0.5), (120, 0.5)])
def test_the_overlong_penalty_grows_in_the_buffer_at_the_end_of_the_budget(tokens, reward):
    shaped = scored(tokens, max_response_tokens=100, overlong_buffer_tokens=40, overlong_penalty=0.5)
    assert shaped.reward == pytest.approx(reward)
    assert shaped.details == {"correct": 1.0, "base": 1.0, "overlong": pytest.approx(reward - 1.0)}


def test_penalties_add_up_and_are_reported_separately():
    rules = {"max_response_tokens": 10, "overlong_buffer_tokens": 10, "format_pattern": "^#", "format_penalty": 0.25}
    assert scored(5, **rules).reward == pytest.approx(0.5)
    assert scored(5, response="?", **rules).details == {
        "correct": 0.0, "base": 0.0, "overlong": -0.5, "format": -0.25
    }  # fmt: skip
    assert scored(5, response="?", **rules).reward == pytest.approx(-0.75)
    assert scored(5).details == {"correct": 1.0}


# --- by name ------------------------------------------------------------------------------------------------


def test_every_built_in_verifier_can_be_found():
    for name in VERIFIERS.shipped:
        check_verifier(name, url="http://127.0.0.1/")


def test_an_unknown_verifier_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"'reward.name' = 'final_anser'"):
        check_verifier("final_anser")
    with pytest.raises(ConfigError, match="'os:no_such_function'"):
        check_verifier("os:no_such_function")
    with pytest.raises(ConfigError, match="'no_such_module:f'"):
        check_verifier("no_such_module:f")
    with pytest.raises(ConfigError, match="Counter is a class"):
        check_verifier("collections:Counter")
    with pytest.raises(ConfigError, match=r"reward\.url"):
        check_verifier("remote")


def test_a_custom_verifier_can_take_prompt_and_tokens_and_return_details(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(
        "def brief(response, label, finish_reason, prompt, tokens):\n"
        "    right = float(label in response)\n"
        "    return right - 0.01 * tokens, {'right': right, 'echo': float(prompt in response)}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    [score] = verify([Item(0, "my_rewards:brief", "1+1 is 2", "2", "stop", "1+1", 5)], RewardRules())
    assert score.reward == pytest.approx(0.95)
    assert score.details == {"right": 1.0, "echo": 1.0, "over_limit": 0.0}


def test_a_verifier_with_slow_imports_is_warmed_up_before_its_process_is_ready(tmp_path, monkeypatch):
    """The time of its first call is not counted against a response."""
    (tmp_path / "first_time.py").write_text(
        "tried = []\n"
        "def plain(response, label, finish_reason): tried.append(response)\n"
        "def heavy(response, label, finish_reason): tried.append((response, label))\n"
        "plain.example = heavy.example = '#{}'.format\n"
        "heavy.needs = 'json'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("plain", "heavy", "nothing"):
        preload(f"first_time:{name}", RewardRules())
    assert importlib.import_module("first_time").tried == [("#1", "1")]


OWN = {
    "def f(response, label): return float(label in response)": 1.0,
    "def f(tokens, label, response): return float(label in response) + tokens": 6.0,
    "def f(text, answer, ending): return float(answer in text and ending == 'stop')": 1.0,
    "def f(text, answer, ending, tokens): return float(answer in text and ending == 'stop') + tokens": 6.0,
    "def f(*, prompt, **rest): return float(prompt == '1+1' and rest['tokens'] == 5)": 1.0,
    "def f(response, label, weight=2.0): return weight * (label in response)": 2.0,
    "def f(label, response, /, tokens): return float(label in response) + tokens": 6.0,
}


@pytest.mark.parametrize("code", OWN)
def test_parameters_of_a_custom_verifier_are_matched_by_name_in_any_order(code, tmp_path, monkeypatch):
    module = f"own_{list(OWN).index(code)}"
    (tmp_path / f"{module}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    [score] = verify([Item(0, f"{module}:f", "1+1 is 2", "2", "stop", "1+1", 5)], RewardRules())
    assert (score.reward, score.error) == (OWN[code], None)


@pytest.mark.parametrize(
    ("parameters", "unknown"),
    [
        ("response, ground_truth", "ground_truth"), ("response, label, n", "n"), ("response, answer, reason", "answer"),
        ("data_source, solution_str, ground_truth, extra_info=None", "data_source"), ("text, truth, why, more", "more"),
        ("text, completion, why, **more", "completion"), ("responses, labels, reasons", "responses"),
        ("question, output, gold", "question"),
    ],
)  # fmt: skip
def test_an_unknown_parameter_is_refused_before_anything_starts(tmp_path, monkeypatch, parameters, unknown):
    """A function with any of April's names is never bound by position."""
    module = f"own_unknown_{unknown}"
    (tmp_path / f"{module}.py").write_text(f"def f({parameters}): return 1.0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=rf"{module}:f.*'{unknown}'"):
        check_verifier(f"{module}:f")


@pytest.mark.parametrize("details", [16, 17])
def test_reserved_details_are_never_lost_and_too_many_others_are_an_error(details):
    given = {f"d{number}": 0.0 for number in range(details)} | {"correct": 1.0}
    score = validated(Score(0, 0.5, None, given), Item(0, "own", "", "", "stop"), RewardRules())
    assert (score.details.get("correct") == 1.0) == (details == 16) != ("18 details" in (score.error or ""))
