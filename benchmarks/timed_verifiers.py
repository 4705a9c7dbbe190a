"""Verifiers that take a known time, for `scoring.py`; its verifier processes load this module and nothing else."""

import time

VERIFIER_S = 0.2


def free(response: str, label: str, finish_reason: str) -> float:
    return 1.0


def slow(response: str, label: str, finish_reason: str) -> float:
    time.sleep(VERIFIER_S)
    return 1.0
