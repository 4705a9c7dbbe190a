"""The uid of a peer's process: the name that the peer has, and what no other process has."""

import uuid

NAME_CHARACTERS = 90
"""so that a uid is no longer than a name may be"""


def new_uid(name: str) -> str:
    return f"{name[:NAME_CHARACTERS]}/{uuid.uuid4().hex}"


def name_of(uid: str) -> str:
    """The name of a process, which may be gone for long; all of a uid that somebody has made in another way."""
    return uid.rpartition("/")[0] or uid
