"""The uid of a peer's process: the peer's name and a random part that no other process has."""

import uuid

NAME_CHARACTERS = 90
"""Longest part of the name in a uid, so that the uid fits the wire type `Name`."""


def new_uid(name: str) -> str:
    return f"{name[:NAME_CHARACTERS]}/{uuid.uuid4().hex}"


def name_of(uid: str) -> str:
    """The name in a uid; the whole uid if it has another form."""
    return uid.rpartition("/")[0] or uid
