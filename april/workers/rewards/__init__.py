"""Verifiers, which compute the reward of a response in separate processes. `verifiers.py` has their interface."""

from april.util.registry import Registry

VERIFIERS = Registry(
    "reward.name",
    "verifier",
    {
        "final_answer": "april.workers.rewards.text:final_answer",
        "exact": "april.workers.rewards.text:exact",
        "regex": "april.workers.rewards.text:regex",
        "f1": "april.workers.rewards.text:f1",
        "choice": "april.workers.rewards.text:choice",
        "math": "april.workers.rewards.mathematics:math",
        "deepscaler": "april.workers.rewards.mathematics:deepscaler",
        "dapo": "april.workers.rewards.mathematics:dapo",
        "gsm8k": "april.workers.rewards.text:gsm8k",
        "code": "april.workers.rewards.code:code",
        "remote": "april.workers.rewards.remote:remote",
        "environment": "april.workers.rewards.verifiers:environment",
    },
    prefixes=("group:", "trl:", "trl_text:", "verl:", "verifiers:"),
)
