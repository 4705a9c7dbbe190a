"""Brokers without sockets that a test has begun, which are closed at its end: each has open files and a thread."""

OPEN: list = []


def close_all():
    while OPEN:
        OPEN.pop().close()
