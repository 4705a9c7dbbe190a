"""What every schedule keeps to, whichever it is: run by `april check schedule`, and by April's own tests."""
