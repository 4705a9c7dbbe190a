"""The dashboard's pages in a browser (Playwright): how to go about in them, and checks of what is shown."""

import os
import re
from pathlib import Path

from tests.support.dashboard_runs import GROUPS, SIZE

PICTURE = {"x": 0, "y": 0, "width": 1280, "height": 720}


def wrong_for_assistance(page):
    """What axe, the checker of accessibility, finds: names, roles, contrast, what the keyboard cannot reach, …"""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    return [(one["id"], node["html"], node["failureSummary"]) for one in found for node in one["nodes"]]


def fits(page):
    """Nothing but what scrolls by itself is wider than the window, once it is laid out."""
    page.wait_for_function("() => document.documentElement.scrollWidth <= innerWidth")


def samples(count):
    """What stands above a table of so many once every file is read: it is not drawn anew under whoever clicks."""
    return re.compile(f"^{count} samples, .* shown[.]$")


ALL_SAMPLES = samples(12 * GROUPS * SIZE)


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
