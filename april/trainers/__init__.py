"""Other trainers on April's rollouts, and other frameworks' scripts as April's configurations."""
