"""The conformance suite of schedules, run by `april check schedule` and by April's own tests."""
