"""Adapters of other frameworks' trainers to `april.rollouts`, one module each."""
