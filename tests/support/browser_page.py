"""Checks of a page that a browser shows (Playwright)."""


def wrong_for_assistance(page):
    """What axe, the checker of accessibility, finds: names, roles, contrast, what the keyboard cannot reach, …"""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    return [(one["id"], node["html"], node["failureSummary"]) for one in found for node in one["nodes"]]


def fits(page):
    """Nothing but what scrolls by itself is wider than the window, once it is laid out."""
    page.wait_for_function("() => document.documentElement.scrollWidth <= innerWidth")
