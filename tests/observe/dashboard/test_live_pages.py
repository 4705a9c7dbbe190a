"""The dashboard's pages while answers arrive: late, cut off, of a run that goes on."""

import re

import orjson
import pytest

from april.observe.report.timeline import waiting_for
from tests.support.browser_page import ALL_SAMPLES, fits, go, picture, samples, shown, wrong_for_assistance
from tests.support.dashboard_runs import NARROW, WIDE
from tests.support.run_processes import steps_recorded, summary, wait_until

pytestmark = pytest.mark.browser


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
    page.get_by_text(ALL_SAMPLES).wait_for()
    with page.expect_response("**/api/runs"):
        held[0].continue_()
    page.evaluate("() => fetch('api/runs').then((answer) => answer.json())")
    assert page.get_by_text(ALL_SAMPLES).is_visible()


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
    page.get_by_text(ALL_SAMPLES).wait_for()
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
