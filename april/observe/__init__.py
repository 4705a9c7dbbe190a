"""What shows a run: report, dashboard, and questions to a live broker."""
