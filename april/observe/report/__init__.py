"""Views of a run: live view, terminal table, HTML report, and exports of traces."""
