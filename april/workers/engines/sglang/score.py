"""Scoring of a text by an SGLang server: the prompt log-probabilities of a /generate call, at temperature 1."""

import uuid
from typing import Any

import numpy as np

from april.workers.engines.sglang.client import ServerRefuses

DTYPES = {"half": "float16", "float": "float32"}
"""Data type names of servers that differ from April's."""


def score_body(tokens: np.ndarray) -> dict[str, Any]:
    """Body of POST /generate. Log-probabilities from the first token on are never read from the prefix cache."""
    rid = uuid.uuid4().hex
    sampling = {
        "max_new_tokens": 1, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0,
        "sampling_seed": 0, "stop_token_ids": [], "ignore_eos": True,
    }  # fmt: skip
    return {
        "rid": rid, "input_ids": tokens.tolist(), "sampling_params": sampling, "return_logprob": True,
        "logprob_start_len": 0, "stream": False, "extra_key": rid,
    }  # fmt: skip


def read_scores(answer: Any, tokens: np.ndarray) -> np.ndarray:
    """Log-probabilities, float32 [T - 1], of all tokens but the first. Raises ServerRefuses."""
    entries = answer["meta_info"].get("input_token_logprobs") or []
    if [entry[1] for entry in entries[1:]] != tokens[1:].tolist():
        raise ServerRefuses(f"the server scores {len(entries)} tokens where {len(tokens)} were asked for, or others")
    return np.array([entry[0] for entry in entries[1:]], np.float32)


def server_dtype(reported: str, declared: str) -> str:
    """Data type that a server computes in, if it reports `reported`.

    `auto` stands for the type `declared` by the model's folder, with bfloat16 in place of float32.
    """
    name = declared if reported == "auto" else reported
    name = DTYPES.get(name, name).removeprefix("torch.")
    return "bfloat16" if reported == "auto" and name == "float32" else name
