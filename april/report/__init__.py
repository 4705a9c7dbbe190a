"""What a run shows of itself: the live view, the table and the HTML report, all read from its folder."""
