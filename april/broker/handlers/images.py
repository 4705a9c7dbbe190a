"""Sends images to workers and the learner, and receives images: from agents processes for their turns, from the learner
for submitted prompts."""

import re
from typing import Any

from zlib_ng.zlib_ng import crc32

from april import wire
from april.broker.images import DamagedImage
from april.broker.peers import Peer
from april.config import ConfigError
from april.data.images import PNG_BYTES, check_prepared, name_of
from april.data.rows import BadRow

IMAGE_NAME = re.compile("[0-9a-f]{64}")
PART_BYTES = 4 << 20
"""Bytes of images from which on an answer to `FetchImages` gets no further image."""
UNREAD_CREDITS = 2
"""Number of credits (`broker.credit_mb` each) of unacknowledged bytes at which a peer gets no more images; more than
one, since other messages may take up one."""


def send_images(handler: Any, peer: Peer, received: wire.Received, now: float) -> None:
    """Answer a `FetchImages`; an image that cannot be read is empty in the answer. `handler`: that of the peer's role.
    Raises DamagedImage for such an image after it has queued the answer, so that the caller discards the groups that
    need it."""
    asked = received.message.names
    if not len({*asked}) == len(asked) <= wire.MAX_IMAGES_ASKED or not all(map(IMAGE_NAME.fullmatch, asked)):
        raise wire.WireError("more images than one request may ask for, one of them twice, or names that are none")
    context, names, arrays, damage = handler.context, list[str](), list[wire.PackedArray](), None
    if not context.peers.has_credit(peer, UNREAD_CREDITS * context.credit_bytes):
        raise wire.WireError("images are asked for while earlier answers are unread; read them, and say so")
    for name in asked:
        try:
            png = context.payloads.images.read(name)
        except DamagedImage as error:
            png, damage = b"", error
        names.append(name)
        arrays.append(wire.PackedArray("u1", crc32(png), png))
        if sum(len(array.data) for array in arrays) >= PART_BYTES:
            break
    context.peers.send_now(peer, wire.Images(names), arrays, received.sequence)
    if damage:
        raise damage


def take_image(handler: Any, peer: Peer, received: wire.Received, now: float) -> None:
    """Take a part of an image (`KeepImage`); with the last part the image is put on disk and acknowledged to the peer.
    Raises OSError if it cannot be written. `handler`: that of the peer's role."""
    part, arrays = received.message, received.packed
    name, begun = peer.image if part.start else (part.name, bytearray())
    peer.image = "", bytearray()
    if not IMAGE_NAME.fullmatch(part.name) or part.size > PNG_BYTES or [array.dtype for array in arrays] != ["u1"]:
        raise wire.WireError(
            f"an image has a sha256 as its name, at most {PNG_BYTES} bytes, and an array for each part"
        )
    length = len(begun) + len(arrays[0].data)
    if (name, len(begun)) != (part.name, part.start) or not len(begun) < length <= part.size:
        raise wire.WireError("a part of an image does not follow the one before it")
    begun += arrays[0].data
    if length < part.size:
        peer.image = name, begun
        return
    images, png = handler.context.payloads.images, bytes(begun)
    fault = "" if name in images else fault_of(name, png, handler.context.prompts.tokenizer)
    if not fault:
        images.keep(name, png)
        images.pin(name)
    handler.context.peers.send_now(peer, wire.ImageKept(name, fault), [], received.sequence)


def fault_of(name: str, png: bytes, tokenizer: Any) -> str:
    """Fault of an uploaded image file: it has another sha256 than `name`, or is not prepared for the policy; "" for
    none. `png`: content of the file."""
    if name_of(png) != name:
        return "its name is not the sha256 of the file"
    try:
        check_prepared(png, tokenizer.image_rule)
    except (BadRow, ConfigError) as error:
        return str(error)
    return ""
