import pytest

from april.wire.security import keygen


@pytest.fixture
def keys(tmp_path):
    """A folder with keys of every part, as `april keygen` makes it."""
    keygen.make_folder(tmp_path / "keys")
    return tmp_path / "keys"
