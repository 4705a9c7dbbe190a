"""April under other people's trainers, a module each, over `april.rollouts`."""
