"""TLS files for tests: a self-signed certificate of this machine, and a key for attached harnesses."""

import subprocess


def make_certificate(folder, address="127.0.0.1"):
    """Make a self-signed certificate; returns the PEM files (certificate, private key)."""
    certificate, key = folder / "april.pem", folder / "april-key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=april", "-addext", f"subjectAltName=DNS:localhost,IP:{address}", "-out", certificate,
         "-keyout", key], check=True, capture_output=True,
    )  # fmt: skip
    return certificate, key


def make_attach_key(folder):
    """Write a file for `agent.attach_keyfile` with a key of 32 characters k."""
    file = folder / "harness.key"
    file.write_text(32 * "k" + "\n")
    file.chmod(0o600)
    return file
