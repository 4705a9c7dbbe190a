"""The dashboard in a real browser: what is seen is what the files say, whatever they say it in."""

import os
import random
import re
from pathlib import Path

import orjson
import pytest

from april.observe.report.timeline import waiting_for
from tests.support.browser_page import fits, wrong_for_assistance
from tests.support.dashboard_runs import (
    BROKEN,
    GROUPS,
    HOSTILE,
    NARROW,
    SIZE,
    WIDE,
    add_step,
    discards,
    make_run,
    row,
    rows_of,
    stored,
    tokenizer,
    write_rows,
)
from tests.support.run_processes import steps_recorded, summary, wait_until

pytestmark = pytest.mark.browser

PICTURE = {"x": 0, "y": 0, "width": 1280, "height": 720}
NAMES_PX = 116
"""of the lanes, left of the first moment"""


def samples(count):
    """What stands above a table of so many once every file is read: it is not drawn anew under whoever clicks."""
    return re.compile(f"^{count} samples, .* shown[.]$")


ALL = samples(12 * GROUPS * SIZE)


def shown(page, name):
    """The value of one of the figures at the top."""
    return page.locator(".fact", has_text=re.compile(f"^{name}")).locator(".value").inner_text()


def picture(page, name):
    """For the page of the dashboard, where it is asked for one: APRIL_PICTURES=docs"""
    if folder := os.environ.get("APRIL_PICTURES"):
        page.mouse.move(0, 0)
        page.screenshot(path=Path(folder) / f"dashboard-{name}.png", clip=PICTURE)


def go(page, view):
    page.get_by_role("link", name=view, exact=True).click()


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
    page.get_by_text(ALL).wait_for()

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
    for name in ("Gap", "Entropy", "Advantage"):
        page.get_by_role("button", name=name, exact=True).click()
        page.locator(f".by-{name.lower()}").wait_for()
        colours = page.locator(".tokens [data-v]").evaluate_all(
            "tokens => [...new Set(tokens.map(token => getComputedStyle(token).backgroundColor))]"
        )
        assert len(colours) == 1 if name == "Advantage" else len(colours) > 5
        assert "rgba(0, 0, 0, 0)" not in colours or name == "Gap"
    page.locator(".tokens").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.locator(".said", has_text="token 2 · “e”").wait_for()
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


def test_a_step_and_its_samples_are_seen_arriving(serve, open_page, tmp_path):
    run = make_run(tmp_path, steps=3)
    page = open_page(serve(run))
    page.locator(".fact", has_text="Step3").wait_for()
    step = add_step(run)
    page.locator(".fact", has_text=f"Step{step}").wait_for()
    go(page, "Samples")
    page.get_by_text(f"{step * GROUPS * SIZE} samples").wait_for()
    step = add_step(run)
    page.get_by_text(f"{step * GROUPS * SIZE} samples").wait_for()


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
    "run": ".chart canvas",
    "samples": ".excerpt",
    "samples/5/50/1": ".tokens [data-v]",
    "samples/5/50": ".card pre",
    "now": ".fact .note",
    "timeline": "canvas.lanes[aria-label*=over]",
    "compare": ".excerpt",
    "logs": "pre.log",
}
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
    (stay,), life_s = sample["stays"], sample["delivered_at"] - sample["opened_at"]
    share = round(100 * (stay["ended"] - stay["began"]) / life_s)
    assert lane.text_content() == f"sample {sample['group']}.{sample['index']}: generating {share} %"
    box = page.locator("canvas.lanes").bounding_box()
    middle_s = (stay["began"] + stay["ended"]) / 2 - sample["opened_at"]
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
    branches = [
        row(1, GROUPS, 0, letters, chance) | {"stays": [acted], "branch": branch, "parent": parent, "shared": shared}
        for branch, parent, shared in ((0, None, None), (1, 0, 5), (2, 1, 7))
    ]
    write_rows(run, 1, branches)
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


def moment(**does):
    """What a broker says, of one worker."""
    worker = {"generating": 0, "weights": 0, "tool": 0, "idle": 0, "admission": 0, "why": ""} | does
    worker |= {"unread_bytes": 16 << 20, "credit_bytes": 64 << 20}
    alike = [
        {"index": index, "state": "leased", "tokens": 10 * index, "attempts": 0, "with": "w1", "for_s": float(index)}
        for index in (3, 5, 7)
    ]
    straggler = {"index": 2, "state": "tool", "tokens": 7912, "attempts": 1, "with": "w2", "for_s": 41.0}
    held = {"with": "w2", "groups": 3, "samples": 1, "scoring": 0, "tool": 1, "tokens": 7912, "for_s": 41.0}
    status = {
        "step": 3, "max_steps": 9, "phase": "generating", "drain": "", "scorers": [],
        "agents": [{"name": "agents-0", "leased": 2, "capacity": 8}],
        "alarms": [{"name": "slow_part", "sentence": "w2 is slow", "page": "docs/watching.md#alarms"}],
        "step_alarms": [{"name": "looping", "sentence": "they loop", "page": "docs/watching.md#alarms"}],
        "queues": {"oldest_waiting_s": 12.0, "longest_lease_s": 41.0, "training_age_s": {"leased": 95.0}},
        "workers": [{"name": "w2", "version": "0.3", "slots": 8, "tokens_per_s": 1234.0, "does": worker}],
        "standing": {
            "batch": {"step": 4, "needed": 32, "ready": 29, "missing": 3, "open": 5},
            "learner": {"does": "idle", "silent_s": 0.4}, "journal_sync_s": 0.0021,
            "queue": {"training": {"leased": 8, "acting": 2}, "evaluation": {}},
            "groups": [{"group": 667, "left": 1, "samples": 8, "waits_for": [*alike, straggler]}], "holding_up": [held],
            "silent": [{"with": "w1", "group": 5, "index": 0, "silent_s": 44.0, "expires_in_s": 16.0}],
        },
    }  # fmt: skip
    return {"status": status, "sentence": waiting_for(status), "at": 0.0}


def test_the_view_is_that_of_the_address_whichever_answer_comes_last(serve, open_page, runs_folder):
    page, held = open_page(serve(runs_folder)), []
    page.get_by_role("link", name="demo").wait_for()
    page.route("**/api/runs", lambda route: held.append(route) if not held else route.continue_())
    with page.expect_request("**/api/runs"):
        page.reload()
    page.goto(f"{page.url.partition('#')[0]}#/demo/samples")
    page.get_by_text(ALL).wait_for()
    with page.expect_response("**/api/runs"):
        held[0].continue_()
    page.evaluate("() => fetch('api/runs').then((answer) => answer.json())")
    assert page.get_by_text(ALL).is_visible()


def test_to_leave_a_view_that_still_asks_for_something_is_no_error(serve, open_page, runs_folder):
    page = open_page(f"{serve(runs_folder)}#/demo/run")
    page.locator(".closes").wait_for()
    page.route(re.compile("/steps$"), lambda route: None)
    with page.expect_request(re.compile("/steps$")):
        page.get_by_role("spinbutton", name="Step").fill("5")
        page.keyboard.press("Enter")
    answers, asked = [{"reading": True, "total": 0}], []
    page.route("**/api/compare?*", lambda route: answers and route.fulfill(json=answers.pop()))
    page.on("request", lambda request: "/api/compare?" in request.url and asked.append(request))
    with page.expect_request(lambda _: len(asked) == 2):
        go(page, "Compare")
    go(page, "Samples")
    page.get_by_text(ALL).wait_for()
    page.unroute_all(behavior="ignoreErrors")


@pytest.mark.full
@pytest.mark.parametrize("viewport", [WIDE, NARROW], ids=["1280", "400"])
def test_now_says_what_everything_is_at_and_is_read_aloud_when_that_changes(serve, open_page, runs_folder, viewport):
    page = open_page(serve(runs_folder), viewport=viewport)
    moments = [moment(generating=3, weights=1, tool=2, idle=2, admission=1, why="barrier"), moment(generating=8)]
    moments[1]["sentence"] = moments[0]["sentence"].replace("41s", "42s")
    moments.append(moments[1] | {"sentence": "A batch is complete; the learner trains."})
    said, shown = [f"event: now\ndata: {orjson.dumps(one).decode()}\n\n" for one in moments], [0]
    headers = {"content-type": "text/event-stream"}
    page.route("**/events/**", lambda route: route.fulfill(body=f"retry: 100\n{said[shown[0]]}", headers=headers))
    page.evaluate("""() => {
      window.told = [];
      new MutationObserver(() => told.push(document.querySelector("main [role=status]")?.textContent))
        .observe(document.querySelector("main"), { subtree: true, childList: true, characterData: true });
    }""")
    page.goto(f"{page.url.partition('#')[0]}#/demo/now")
    row = page.get_by_role("row", name=re.compile("^w2 0.3"))
    row.get_by_text(
        "1 wait for weights; 2 wait for a tool; 2 idle: barrier: the learner has yet to make the next weights; "
        "1 wait for admission; 16 of 64 MiB unread"
    ).wait_for()
    assert "3 of 8 generate" in row.inner_text() and wrong_for_assistance(page) == []
    for text in (".2 tool at w2, 7,912 tokens, for 41 s, 1 attempt lost",
                 ".3 .5 .7 leased at w1, 30 to 70 tokens, for up to 7.0 s", "5.0 at w1: not renewed for 44 s",
                 "slow part: w2 is slow", "looping: they loop (docs/watching.md#alarms)",
                 "agents-0 runs agents: 2 of 8", "oldest 1 min 35 s"):  # fmt: skip
        page.get_by_text(text).first.wait_for()
    fits(page)
    for shown[0], text in ((1, "for 42s"), (2, "A batch is complete")):
        page.locator(".sentence", has_text=text).wait_for()
    told = [text for text in page.evaluate("told") if text]
    assert list(dict.fromkeys(told)) == [moments[0]["sentence"], moments[2]["sentence"]]


def test_an_answer_that_is_given_up_or_cut_off_midway_is_no_answer(serve, open_page, runs_folder):
    page = open_page(serve(runs_folder))
    ends = page.evaluate("""async () => {
      const { ask } = await import("./lib.js");
      const ends = [];
      for (const given_up of [true, false]) {
        const abort = new AbortController();
        window.fetch = async () => new Response(new ReadableStream({
          start(body) {
            setTimeout(() => { if (given_up) abort.abort(); body.error(new TypeError("network error")); });
          },
        }));
        ends.push(await ask("api/runs", abort.signal).catch((error) => `${error.name}: ${error.message}`));
      }
      return ends;
    }""")
    assert ends[0].startswith("AbortError") and ends[1] == "Error: the dashboard answered 200, and not to the end"


def test_a_live_run_says_what_it_waits_for_and_its_steps_arrive(serve, open_page, start_run, run_dir, gate):
    """The first step ends when both pages have seen the run: it cannot be over before they are there."""
    job = start_run("--schedule.max_steps", "6", *gate.hold(0))
    wait_until((run_dir / "address").exists, job)
    page = open_page(f"{serve(run_dir)}#/small/now")
    page.locator(".sentence", has_text=re.compile("learner")).wait_for()
    page.locator(".fact", has_text="Phase").wait_for()
    picture(page, "now")
    by_address = open_page(serve((run_dir / "address").read_text()))
    by_address.locator(".fact", has_text="Phase").wait_for()
    assert by_address.url.endswith("#/live/now")
    assert by_address.locator("nav a").all_inner_texts() == ["Now"], "there are no files to show"
    gate.open()
    go(page, "Run")
    wait_until(lambda: steps_recorded(run_dir) >= 2, job)
    page.wait_for_function("() => Number(document.querySelector('.fact .value')?.textContent) >= 2")
    assert job.wait() == 0, job.output
    page.locator("#state", has_text="finished").wait_for()
    page.locator(".fact", has_text="Step6").wait_for()
    reward = pytest.approx(summary(run_dir)["reward"]["last3"], abs=1e-3)
    wait_until(lambda: float(shown(page, "Reward")) == reward)
    go(page, "Now")
    page.locator(".sentence", has_text="No broker answers.").wait_for()
    go(page, "Samples")
    page.get_by_text(samples("[0-9]+")).wait_for()
    page.locator("tbody tr th a").first.click()
    page.locator(".tokens [data-v]").first.wait_for()
    page.get_by_role("heading", name="Its life").wait_for()
