"""Answers requests for the images of prompts, of workers and of the learner."""

import re
from typing import Any

from zlib_ng.zlib_ng import crc32

from april import wire
from april.broker.images import DamagedImage
from april.broker.peers import Peer

IMAGE_NAME = re.compile("[0-9a-f]{64}")
PART_BYTES = 4 << 20
"""Bytes of images in one answer; it ends with the image that reaches them."""
UNREAD_CREDITS = 2
"""Unread bytes at which a peer gets no more images, in its credits: what else it is sent may use up one of them."""


def send_images(handler: Any, peer: Peer, received: wire.Received, now: float) -> None:
    """Answer a `FetchImages`. `handler`: that of the peer's role. Raises DamagedImage for an image that cannot be read,
    once the answer is queued: the groups that need it are discarded."""
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
