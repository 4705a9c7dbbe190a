"""Which stretch of a response was sampled under which version, in 16 bytes a stretch: there are a great many."""

from array import array
from collections.abc import Iterable, Iterator, Sequence

from april.wire.version import Version

Segment = tuple[int, int, Version]
"""(start, end, version)"""

WIDTH = 4
"""numbers of a segment: start, end, branch, step"""


class Segments:
    """In order of their tokens; the gaps between them are observations."""

    __slots__ = ("_numbers",)

    def __init__(self, segments: Iterable[Segment] = ()):
        self._numbers = array("I")
        for start, end, version in segments:
            self._numbers.extend((start, end, *version))

    @classmethod
    def from_bytes(cls, data: bytes) -> "Segments":
        """The inverse of `to_bytes`, on a machine of the same byte order."""
        segments = cls()
        segments._numbers.frombytes(data)
        return segments

    def to_bytes(self) -> bytes:
        return self._numbers.tobytes()

    def extend_by(self, start: int, end: int, branch: int, step: int) -> None:
        """Tokens were sampled behind the others; they are the last segment's where they follow it under its version."""
        numbers = self._numbers
        if numbers and numbers[-3] == start and numbers[-1] == step and numbers[-2] == branch:
            numbers[-3] = end
        else:
            numbers.extend((start, end, branch, step))

    @property
    def tokens(self) -> int:
        """Of all of them."""
        numbers = self._numbers
        return numbers[1] - numbers[0] if len(numbers) == WIDTH else sum(numbers[1::WIDTH]) - sum(numbers[::WIDTH])

    def tokens_by_step(self) -> Iterator[tuple[int, int]]:
        """(policy step, tokens) of each."""
        numbers = iter(self._numbers)
        return ((step, end - start) for start, end, _, step in zip(numbers, numbers, numbers, numbers, strict=True))

    @property
    def end(self) -> int:
        """Of the last one, 0 if there is none."""
        return self._numbers[-3] if self._numbers else 0

    @property
    def last_step(self) -> int:
        """The step of the last one's version, 0 if there is none."""
        return self._numbers[-1] if self._numbers else 0

    def __len__(self) -> int:
        return len(self._numbers) // WIDTH

    def __getitem__(self, place: int) -> Segment:
        first = WIDTH * range(len(self))[place]
        start, end, branch, step = self._numbers[first : first + WIDTH]
        return start, end, Version(branch, step)

    def __iter__(self) -> Iterator[Segment]:
        numbers = iter(self._numbers)
        for start, end, branch, step in zip(numbers, numbers, numbers, numbers, strict=True):
            yield start, end, Version(branch, step)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Segments | Sequence) and list(self) == list(other)

    def __repr__(self) -> str:
        return repr(list(self))
