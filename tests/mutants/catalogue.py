"""The planted faults as they stand in the `*.toml` files, and what one does to a tree."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
KEYS = {"promise", "where", "old", "new", "caught_by"}


class BadMutant(ValueError):
    """An entry that cannot be planted; the text says which and why."""


@dataclass(frozen=True)
class Mutant:
    name: str
    promise: str
    """that it breaks: the sentence in the table of docs/testing.md"""
    where: str
    """a file, or a folder in one of whose files `old` stands"""
    old: str
    """text of the source that stands there exactly once"""
    new: str
    caught_by: str
    """node id of the test that must fail"""

    def find(self, tree: Path) -> Path:
        """The file that it changes. Raises BadMutant."""
        where = tree / self.where
        files = sorted(where.rglob("*.py")) if where.is_dir() else [where]
        found = {file: file.read_text().count(self.old) for file in files if file.exists()}
        if sum(found.values()) != 1:
            raise BadMutant(
                f"mutant {self.name}: its old text stands {sum(found.values())} times in {self.where}, not once; "
                "take a snippet that is there now"
            )
        return next(file for file, count in found.items() if count)

    def plant(self, tree: Path) -> Path:
        """Put the fault into a tree; the file that it is in."""
        file = self.find(tree)
        file.write_text(file.read_text().replace(self.old, self.new))
        return file


def load(folder: Path = Path(__file__).parent) -> dict[str, Mutant]:
    """All of them by name. Raises BadMutant."""
    mutants: dict[str, Mutant] = {}
    for path in sorted(folder.glob("*.toml")):
        for name, fields in tomllib.loads(path.read_text()).items():
            if name in mutants:
                raise BadMutant(f"mutant {name} of {path.name} is named twice; give it another name")
            if set(fields) != KEYS:
                raise BadMutant(f"mutant {name} of {path.name} has the keys {sorted(fields)}; it needs {sorted(KEYS)}")
            mutants[name] = Mutant(name, **fields)
    return mutants
