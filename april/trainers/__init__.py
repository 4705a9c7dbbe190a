"""Trainers other than April's own, on April's rollouts, and other frameworks' scripts as April's configurations."""
