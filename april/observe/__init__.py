"""Views of a run: report, dashboard, and status requests to a live broker."""
