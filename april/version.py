"""Which April this is."""

VERSION = "0.2.0"
