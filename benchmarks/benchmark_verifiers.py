"""Verifiers for policies that can do nothing; verifier processes load this module and nothing else."""

import time
import zlib

VERIFIER_S = 0.2


def free(response: str, label: str, finish_reason: str) -> float:
    return 1.0


def slow(response: str, label: str, finish_reason: str) -> float:
    time.sleep(VERIFIER_S)
    return 1.0


def coin(response: str, label: str, finish_reason: str) -> float:
    """0 or 1, by the response, so that groups have a spread to train on."""
    return float(zlib.crc32(response.encode()) & 1)
