"""April: active partial rollouts for RL of language models.

A durable message broker between generation workers and a distributed learner.
"""

__version__ = "0.2.0"
