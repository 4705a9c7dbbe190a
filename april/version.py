"""The version of April."""

VERSION = "0.2.0"
