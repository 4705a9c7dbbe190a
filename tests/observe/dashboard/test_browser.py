"""The dashboard in a real browser: what is seen is what the files say, whatever they say it in."""

import random
import re

import orjson
import pytest

from tests.support.browser_page import ALL_SAMPLES, fits, go, picture, samples, shown, wrong_for_assistance
from tests.support.dashboard_runs import (
    BROKEN,
    GROUPS,
    HOSTILE,
    NARROW,
    SIZE,
    WIDE,
    discards,
    make_run,
    row,
    rows_of,
    stored,
    tokenizer,
    write_rows,
)

pytestmark = pytest.mark.browser

NAMES_PX = 116
"""of the lanes, left of the first moment"""


def test_from_the_curves_to_a_step_to_a_sample_to_a_token(serve, open_page, runs_folder):
    page = open_page(serve(runs_folder))
    page.get_by_role("link", name="demo").click()
    page.locator(".chart canvas").first.wait_for()
    page.locator(".fact", has_text="Step12of 12").wait_for()
    page.locator(".closes").wait_for()
    assert page.locator(".chart:not(.empty)").count() >= 7
    picture(page, "run")
    page.get_by_role("button", name="Time").click()
    page.locator(".chart .u-over").first.click()
    page.get_by_role("link", name=re.compile("Samples of step")).click()
    page.get_by_text(samples(GROUPS * SIZE)).wait_for()
    page.get_by_role("link", name="Clear").or_(page.get_by_role("button", name="Clear")).click()
    page.get_by_text(ALL_SAMPLES).wait_for()

    page.get_by_label("Reward, most").fill("0.5")
    page.get_by_text(f"{12 * GROUPS} samples").wait_for()
    page.get_by_role("button", name="Tokens").click()
    page.locator("th[aria-sort=descending]", has_text="Tokens").wait_for()
    tokens = [int(text) for text in page.locator("tbody tr td:nth-child(6)").all_inner_texts()]
    assert tokens == sorted(tokens, reverse=True) and len(tokens) == 50
    page.locator(".excerpt").nth(20).wait_for()
    references = page.locator("tbody tr td:nth-child(4)").all_inner_texts()
    assert set(references) <= {str(2 * group) for group in range(GROUPS)} and len(set(references)) > 1
    picture(page, "samples")
    page.reload()
    page.get_by_text(f"{12 * GROUPS} samples").wait_for()
    page.get_by_label("Search prompts and responses").fill("step 7.")
    page.get_by_text(f"{GROUPS} found.").wait_for()
    page.get_by_role("link", name="Sample 72.3 of step 7").click()

    page.get_by_role("heading", name="Sample 72.3").wait_for()
    versions = page.locator(".tokens [data-v]").evaluate_all(
        "tokens => [...new Set(tokens.map(token => getComputedStyle(token).backgroundColor))]"
    )
    assert len(versions) == 2 and page.locator(".speech.other").count() == 1
    assert shown(page, "Reference") == "4"
    text = "".join(page.locator(".tokens").all_text_contents())
    assert text == "Let me think about step 7. It is 5 ✓"
    picture(page, "sample")
    for name, shown_by in (
        ("Gap", "gap"),
        ("Entropy", "entropy"),
        ("big teacher", "score"),
        ("Advantage", "advantage"),
    ):
        page.get_by_role("button", name=name, exact=True).click()
        page.locator(f".by-{shown_by}").wait_for()
        colours = page.locator(".tokens [data-v]").evaluate_all(
            "tokens => [...new Set(tokens.map(token => getComputedStyle(token).backgroundColor))]"
        )
        assert len(colours) == 1 if name == "Advantage" else len(colours) > 5
        assert "rgba(0, 0, 0, 0)" not in colours or name == "Gap"
    page.locator(".tokens").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.locator(".said", has_text="token 2 · “e”").wait_for()
    page.locator(".said", has_text="big_teacher").wait_for()
    assert "by=advantage" in page.url
    page.get_by_role("link", name="The whole group").click()
    page.get_by_role("heading", name="Group 72").wait_for()
    assert page.locator(".card").count() == page.locator(".card .reference", has_text="4").count() == SIZE
    page.go_back()
    page.get_by_role("link", name="This prompt in other steps").click()
    page.get_by_text(f"{12 * SIZE} samples").wait_for()


def test_two_steps_and_two_runs_beside_each_other(serve, open_page, runs_folder):
    page = open_page(serve(runs_folder) + "#/demo/run?steps=3,9&with=other&more=learner.grad_norm")
    row = page.get_by_role("row", name=re.compile("^reward "))
    row.wait_for()
    cells = row.locator("td").all_inner_texts()
    assert len(cells) == 3 and float(cells[2]) == pytest.approx(float(cells[1]) - float(cells[0]), abs=1e-3)
    page.get_by_label(re.compile("Reward: demo: trained from .*; other: trained")).wait_for()
    page.get_by_label(re.compile("learner.grad_norm: demo")).wait_for()
    page.get_by_role("spinbutton", name="Step").fill("5")
    page.keyboard.press("Enter")
    page.get_by_role("link", name="Samples of step 5").wait_for()


def test_hostile_sample_text_is_shown_as_text(serve, open_page, runs_folder):
    address = serve(runs_folder)
    page = open_page(f"{address}#/demo/samples?step.max=1&sort=index")
    page.get_by_text("<script>document.title='taken'</script>").first.wait_for()
    fits(page)
    for index, text in enumerate(HOSTILE):
        page.goto(f"{address}#/demo/samples/1/10/{index}")
        page.get_by_role("heading", name=f"Sample 10.{index}").wait_for()
        page.evaluate("() => { for (let more; (more = document.querySelector('.rest')); ) more.click(); }")
        assert page.locator(".tokens").text_content() == text
        fits(page)
    page.goto(f"{address}#/demo/samples/1/10")
    assert page.locator(".card pre").nth(0).text_content() == HOSTILE[0]
    page.goto(f"{address}#/demo/samples/1/{10 + GROUPS - 1}")
    page.get_by_text(BROKEN.decode(errors="replace")).wait_for()
    assert "taken" not in page.title() and page.locator("main script, main img").count() == 0


VIEWS = {
    "run": ".chart canvas", "samples": ".excerpt", "samples/5/50/1": ".tokens [data-v]", "samples/5/50": ".card pre",
    "now": ".fact .note", "timeline": "canvas.lanes[aria-label*=over]", "compare": ".excerpt", "logs": "pre.log",
}  # fmt: skip
"""and what is there once they are drawn"""


@pytest.mark.parametrize(("scheme", "viewport"), [("light", NARROW), ("dark", WIDE)], ids=["light-400", "dark-1280"])
def test_every_view_in_every_colour_and_width(serve, open_page, runs_folder, scheme, viewport):
    address = serve(runs_folder)
    page = open_page(f"{address}#/demo/run", viewport=viewport, color_scheme=scheme)
    for view, drawn in VIEWS.items():
        page.goto(f"{address}#/demo/{view}")
        page.locator(drawn).first.wait_for()
        fits(page)
        red = page.evaluate("getComputedStyle(document.documentElement).backgroundColor").split("(")[1].split(",")[0]
        assert (int(red) > 128) == (scheme == "light")
        assert wrong_for_assistance(page) == [], view


def test_a_timeline_that_is_not_read_yet_is_fit_for_assistance(serve, open_page, runs_folder):
    address = serve(runs_folder)
    page = open_page(f"{address}#/demo/run")
    page.route(re.compile("/(steps|timeline)([?]|$)"), lambda route: None)
    page.goto(f"{address}#/demo/timeline")
    page.locator(".strip").wait_for()
    assert wrong_for_assistance(page) == []
    page.unroute_all(behavior="ignoreErrors")


def test_lanes_are_zoomed_and_prompts_compared(serve, open_page, runs_folder):
    address = serve(runs_folder)
    page = open_page(f"{address}#/demo/timeline")
    lanes, said = page.locator("canvas.lanes"), page.locator(".said")
    lanes.wait_for()
    page.locator(".said", has_text="3 workers").wait_for()
    picture(page, "timeline")
    before = page.url
    box = lanes.bounding_box()
    page.mouse.move(box["x"] + 300, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + 500, box["y"] + 60)
    page.mouse.up()
    page.wait_for_url(re.compile("from=.*to="))
    assert page.url != before
    page.mouse.move(box["x"] + 400, box["y"] + 62)
    page.wait_for_function("() => /^worker-0: /.test(document.querySelector('.said').textContent)")
    assert "generating" in page.locator(".hidden ul").text_content() and said.is_visible()
    page.get_by_role("button", name="All").click()
    page.mouse.move(0, 0)
    page.locator(".said", has_text=re.compile("^[0-9].* from 0.0 s on, 3 workers[.]")).wait_for()
    go(page, "Compare")
    page.get_by_text(re.compile("^6 prompts have samples in both[.] Each .* each other[.]$")).wait_for()  # all is read
    page.get_by_role("link", name="How much is 3 + 3?").click()
    page.get_by_role("heading", name=re.compile("^Step 12, 123.0")).first.wait_for()
    assert page.locator(".two section").count() == 2


def test_a_sample_s_life_is_a_lane_among_those_of_the_run(serve, open_page, runs_folder):
    sample = stored(runs_folder / "demo", 5)[7]
    page = open_page(f"{serve(runs_folder)}#/demo/samples/5/{sample['group']}/{sample['index']}")
    page.get_by_role("link", name="Its life among the lanes of the run").click()
    lane = page.locator(".hidden li", has_text=f"sample {sample['group']}.{sample['index']}:")
    lane.wait_for(state="attached")
    (span,), life_s = sample["spans"], sample["delivered_at"] - sample["opened_at"]
    share = round(100 * (span["ended"] - span["began"]) / life_s)
    assert lane.text_content() == f"sample {sample['group']}.{sample['index']}: generating {share} %"
    box = page.locator("canvas.lanes").bounding_box()
    middle_s = (span["began"] + span["ended"]) / 2 - sample["opened_at"]
    x = NAMES_PX + (box["width"] - NAMES_PX - 8) * middle_s / life_s
    page.mouse.move(box["x"] + x, box["y"] + 35)
    page.locator(".said", has_text=f"sample {sample['group']}.{sample['index']}: generating for 2.0 s").wait_for()
    page.get_by_role("button", name="Closer").click()
    page.wait_for_url(re.compile(f"sample=5.{sample['group']}.{sample['index']}"))


@pytest.mark.full
def test_discarded_samples_are_chosen_by_their_reason_and_say_what_happened(serve, open_page, tmp_path):
    run, letters = make_run(tmp_path, steps=3), tokenizer()
    chance = random.Random(0)
    write_rows(run, 3, [*rows_of(3, letters, chance), *discards(3, letters, chance)])
    page = open_page(f"{serve(run)}#/demo/samples")
    page.get_by_text(samples(3 * GROUPS * SIZE + 3)).wait_for()
    page.get_by_label("Discarded").select_option("zero_spread")
    page.get_by_text("2 samples").wait_for()
    page.get_by_label("Discarded").select_option("dead_sample")
    page.get_by_text("1 sample, 1 to 1 shown.").wait_for()
    page.locator("tbody th a").click()
    dead = next(row for row in stored(run, 3) if row["discarded"] == "dead_sample")
    page.get_by_role("heading", name=f"Sample {dead['group']}.{dead['index']}").wait_for()
    page.get_by_text(f"Discarded as dead sample, 5 failed attempts: {dead['error']}").wait_for()
    assert shown(page, "Reward") == "–" and shown(page, "Life") == "6.0 s" and "discarded=dead_sample" in page.url
    page.get_by_text("Its tokens came in 2 chunks").click()
    count = len(dead["response_ids"])
    page.get_by_text(f"tokens 0 to {count // 2}: after 1.3 s").wait_for()
    assert page.locator(".track i.chunk").count() == 2
    page.locator(".tokens [data-at]").last.hover()
    page.locator(".said", has_text="came after 2.5 s").wait_for()
    page.get_by_role("link", name="The whole group").click()
    page.get_by_text("1 sample of one prompt, rewards not known.").wait_for()


def test_held_out_samples_are_chosen_and_say_of_which_weights_they_are(serve, open_page, tmp_path):
    run, letters, chance = make_run(tmp_path, steps=3), tokenizer(), random.Random(0)
    (segment,) = (one := row(2, GROUPS, 0, letters, chance))["segments"]
    held = one | {"held_out": "hard", "segments": [segment | {"step": 2}], "trained": False, "advantage": None}
    write_rows(run, 2, [*rows_of(2, letters, chance), held])
    page = open_page(f"{serve(run)}#/demo/samples")
    page.get_by_text(samples(3 * GROUPS * SIZE + 1)).wait_for()
    page.get_by_label("Held out").select_option("hard")
    page.get_by_text("1 sample, 1 to 1 shown.").wait_for()
    page.locator("tbody th a").click()
    page.get_by_text("held out, hard: weights 2").wait_for()
    assert shown(page, "Reference") == str(2 * GROUPS) and "Advantage" not in page.locator(".facts").inner_text()


@pytest.mark.full
def test_the_forks_of_a_session_are_shown_as_a_tree(serve, open_page, tmp_path):
    run, letters, chance = make_run(tmp_path, steps=1), tokenizer(), random.Random(0)
    acted = {"what": "act", "where": "agents-0", "began": 1.0, "ended": 2.0, "start": 0, "end": 0, "how": "scored"}
    forks = [
        row(1, GROUPS, 0, letters, chance) | {"spans": [acted], "fork": fork, "parent": parent, "shared": shared}
        for fork, parent, shared in ((0, None, None), (1, 0, 5), (2, 1, 7))
    ]
    write_rows(run, 1, forks)
    page = open_page(f"{serve(run)}#/demo/samples/1/{10 + GROUPS}/0")
    tree = page.locator(".panel", has_text="Its session")
    tree.get_by_text("forks from fork 1 after 7 tokens").wait_for()
    assert tree.locator("li li li a").all_inner_texts() == ["Fork 2"]
    tree.get_by_role("link", name="Fork 2").click()
    page.get_by_role("heading", name=f"Sample {10 + GROUPS}.0/2").wait_for()
    tree.locator("a[aria-current]", has_text="Fork 2").wait_for()


def shown_in(canvas):
    """Picture of a canvas, which another replaces each time that figures arrive."""
    from playwright.sync_api import Error

    while True:
        try:
            return canvas.screenshot()
        except Error as error:
            if "not attached" not in str(error):
                raise


def test_curves_are_smoothed_and_drawn_on_a_log_axis_as_the_address_says(serve, open_page, runs_folder):
    address = serve(runs_folder)
    page = open_page(f"{address}#/demo/run")
    loss = page.locator("figure", has_text="Gradient norm").locator("canvas")
    loss.wait_for()
    drawn = {"plain": shown_in(loss)}
    page.get_by_label("Log axis").check()
    drawn["log"] = shown_in(loss)
    page.get_by_label("Smoothing").select_option("5")
    drawn["smooth"] = shown_in(loss)
    assert len(set(drawn.values())) == 3 and "smooth=5&log=1" in page.url
    page.reload()
    loss.wait_for()
    assert page.get_by_label("Log axis").is_checked() and page.get_by_label("Smoothing").input_value() == "5"


def test_runs_are_sorted_by_what_they_have_and_a_log_is_read(serve, open_page, tmp_path):
    for number, name in enumerate(("run-2", "run-10", "run-1")):
        run = make_run(tmp_path, name, steps=1)
        points = [{"step": 0, "accuracy": 0.1 + number, "prompts": 4}] if number else []
        said = orjson.loads((run / "summary.json").read_bytes()) | {"evaluation": points}
        (run / "summary.json").write_bytes(orjson.dumps(said))
    (run / "logs").mkdir()
    (run / "logs/broker.log").write_text("<b>the broker listens</b>\n")
    page = open_page(serve(tmp_path / "runs"))
    names = page.locator("tbody th")
    names.first.wait_for()
    assert names.all_inner_texts() == ["run-1", "run-2", "run-10"]
    page.get_by_role("button", name="Held out").click()
    page.locator("th[aria-sort=descending]", has_text="Held out").wait_for()
    assert names.all_inner_texts() == ["run-1", "run-10", "run-2"], "without an evaluation comes last"
    page.get_by_role("button", name="Held out").click()
    page.locator("th[aria-sort=ascending]", has_text="Held out").wait_for()
    assert names.all_inner_texts() == ["run-10", "run-1", "run-2"] and wrong_for_assistance(page) == []
    page.get_by_role("link", name="run-1", exact=True).click()
    go(page, "Logs")
    page.locator("pre.log", has_text="<b>the broker listens</b>").wait_for()
    go(page, "config.toml")
    page.locator("pre.log", has_text="[schedule]").wait_for()


@pytest.mark.full
def test_it_is_used_by_the_keyboard_alone_and_read_out(serve, open_page, runs_folder):
    """What a screen reader is given: one first heading a view, places by name, a name for whatever acts or is drawn."""
    address = serve(runs_folder)
    page = open_page(f"{address}#/demo/run")
    for view, drawn in VIEWS.items():
        page.goto(f"{address}#/demo/{view}")
        page.locator(drawn).first.wait_for()
        told = page.locator("body").aria_snapshot()
        assert re.search(r"^- main", told, re.M) and "- navigation" in told, view
        assert len(re.findall(r"heading .*\[level=1\]", told)) == 1, view
        acting = re.findall(
            r"- (button|link|textbox|searchbox|spinbutton|combobox|slider|img|table)(?=:|$)(.*)", told, re.M
        )
        assert acting == [], f"{view}: without a name"
    page.goto(f"{address}#/demo/samples")
    page.locator(".excerpt").first.wait_for()
    assert page.evaluate("document.activeElement.id") == "view", "who goes on to a view is in it"
    page.reload()
    page.locator(".excerpt").first.wait_for()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "view" and "demo/samples" in page.url
    page.get_by_role("searchbox").focus()
    for _ in range(200):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.matches('tbody th a')"):
            break
    first = page.evaluate("document.activeElement.textContent")
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    page.keyboard.press("ArrowDown")
    second = page.evaluate("document.activeElement.textContent")
    assert second != first and outline != "none"
    page.keyboard.press("Enter")
    page.get_by_role("heading", name=f"Sample {second}").wait_for()
