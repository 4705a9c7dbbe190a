"""An HTTP GET request."""

import urllib.error
import urllib.request


def get(url):
    """Send a GET request; returns (status, body)."""
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
