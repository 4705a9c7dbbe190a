"""The text of each token, by the tokenizer of the run's policy, if its folder is available."""

import threading
from pathlib import Path

TOKENIZER_FILE = "tokenizer.json"


class TokenTexts:
    """Decodes single tokens. Only the last tokenizer is kept, because large vocabularies take much memory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._folder: Path | None = None
        self._tokenizer = None

    def texts(self, folder: Path, ids: list[int]) -> list[str] | None:
        """The text of each token, "" where its character continues in the next token; None without a readable
        tokenizer."""
        from tokenizers.decoders import DecodeStream

        with self._lock:
            if folder != self._folder:
                self._folder, self._tokenizer = folder, load(folder)
            if self._tokenizer is None:
                return None
            stream, texts = DecodeStream(skip_special_tokens=False), []
            for token in ids:
                try:
                    texts.append(stream.step(self._tokenizer, token) or "")
                except Exception:  # an id outside the vocabulary, or bytes that never form a character
                    stream = DecodeStream(skip_special_tokens=False)
                    texts.append("�")
            return texts


def load(folder: Path):
    from tokenizers import Tokenizer

    path = folder / TOKENIZER_FILE
    try:
        return Tokenizer.from_file(str(path)) if path.is_file() else None
    except Exception:  # the Rust library raises plain Exception
        return None
