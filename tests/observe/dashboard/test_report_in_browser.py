"""A report in a real browser, from its file alone: the dashboard's run page, whatever the run's texts are."""

import pytest

from april.observe.dashboard.report import write_report
from tests.support.browser_page import fits, wrong_for_assistance
from tests.support.dashboard_runs import NARROW, WIDE, make_run

pytestmark = pytest.mark.browser


@pytest.fixture
def open_report(open_page):
    """open_report(run folder, **of the context) -> the page of its report, which asks for no other file"""

    def begin(run, **context):
        file = write_report(run).resolve().as_uri()
        page = open_page(file, **context)
        page.on("request", lambda asked: pytest.fail(f"the report asks for {asked.url}"))
        page.locator(".chart canvas").nth(4).wait_for()
        page.get_by_role("heading", name="Summary").wait_for()
        return page

    return begin


@pytest.mark.parametrize("viewport", [WIDE, NARROW], ids=["1280", "400"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_report_shows_the_run_in_every_colour_and_width(open_report, runs_folder, scheme, viewport):
    page = open_report(runs_folder / "demo", viewport=viewport, color_scheme=scheme)
    page.locator(".fact", has_text="Step12of 12").wait_for()
    page.locator("canvas.lanes").first.wait_for()
    assert page.locator(".chart:not(.empty)").count() >= 14 and page.locator("#tabs a").count() == 0
    assert "worker-0: generating" in page.locator(".lanes .hidden").first.text_content()
    page.get_by_text("Where every token is").click()
    page.get_by_role("row", name="sum of all states").wait_for()
    fits(page)
    assert wrong_for_assistance(page) == []


def test_steps_and_figures_are_chosen_in_a_report_as_in_the_dashboard(open_report, runs_folder):
    page = open_report(runs_folder / "demo")
    page.get_by_role("button", name="Time").click()
    page.get_by_role("spinbutton", name="Step").fill("5")
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Step 5").wait_for()
    assert page.get_by_role("link", name="Samples of step 5").count() == 0, "a report has no other views"
    page.get_by_label("Another figure to draw").select_option("round.partials_waiting")
    page.get_by_label("round.partials_waiting: partials_waiting from").wait_for()
    page.get_by_role("button", name="Colours").click()
    page.wait_for_function("document.documentElement.dataset.theme === 'dark'")
    page.locator(".chart canvas").first.wait_for()


def test_a_report_without_steps_or_samples_says_so(open_page, tmp_path):
    run = make_run(tmp_path, steps=1)
    for path in (run / "metrics.jsonl", run / "summary.json", run / "samples/step_000001.parquet"):
        path.unlink()
    page = open_page(write_report(run).resolve().as_uri())
    page.get_by_text("No samples are kept.").wait_for()
    page.get_by_text("No token has been generated yet.").wait_for()
    assert page.locator(".chart.empty").count() > 10 and page.locator(".chart canvas").count() == 0
