"""`april keygen`: CURVE keys of a run's peers."""

from collections.abc import Iterator
from pathlib import Path

from april.cli.command import command, option
from april.util.errors import ConfigError


class Roles:
    """The roles that have CURVE keys, as choices of an option; they are imported only when a role is given or listed,
    so that commands start fast."""

    def __iter__(self) -> Iterator[str]:
        from april.wire.security.keys import ROLES

        return iter(ROLES)


@command(
    option("folder", type=Path, metavar="KEYS", help="Folder of the key files and the allow-list."),
    option(
        "--role",
        choices=Roles(),
        metavar="ROLE",
        help="Role of one more peer: %(choices)s [default: make the keys of all roles].",
    ),
    option("--name", help="Name of the peer given by --role, and of its key file; unique in the allow-list."),
)
def keygen(folder: Path, role: str | None, name: str | None) -> int:
    """Make the keys of a run, or those of one more peer."""
    from april.wire.security import keygen

    if bool(role) != bool(name):
        raise ConfigError("options '--role' and '--name' go together; give both for one more peer, or none of them")
    if role and name:
        print(keygen.add_peer(folder, role, name))
    else:
        print(*keygen.make_folder(folder), sep="\n")
    return 0
