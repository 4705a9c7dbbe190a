"""The error that a user is to read, apart from everything that raises it."""


class ConfigError(ValueError):
    """A configuration that cannot work; the text says which key, which value and how to mend it."""
