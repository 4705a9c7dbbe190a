"""The text of each token, by the tokeniser of the run's policy, where its folder is at hand."""

import threading
from pathlib import Path

TOKENIZER_FILE = "tokenizer.json"


class Pieces:
    """One tokeniser at a time is kept; there may be several runs, and large vocabularies take much memory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._folder: Path | None = None
        self._tokenizer = None

    def of(self, folder: Path, ids: list[int]) -> list[str] | None:
        """A text a token, "" where a character goes on in the next; None without a tokeniser that can be read."""
        from tokenizers.decoders import DecodeStream

        with self._lock:
            if folder != self._folder:
                self._folder, self._tokenizer = folder, load(folder)
            if self._tokenizer is None:
                return None
            stream, pieces = DecodeStream(skip_special_tokens=False), []
            for token in ids:
                try:
                    pieces.append(stream.step(self._tokenizer, token) or "")
                except Exception:  # an id that the vocabulary has not, or bytes that never become a character
                    stream = DecodeStream(skip_special_tokens=False)
                    pieces.append("�")
            return pieces


def load(folder: Path):
    from tokenizers import Tokenizer

    path = folder / TOKENIZER_FILE
    try:
        return Tokenizer.from_file(str(path)) if path.is_file() else None
    except Exception:  # what the Rust library raises has no class of its own
        return None
