"""The HTTP APIs that the gateway serves, one class and one module each."""
