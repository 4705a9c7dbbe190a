"""Adapters of other frameworks' trainers to `april.trainers.rollouts`, one module each."""
