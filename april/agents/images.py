"""The images of agents' requests: found in the bodies of all APIs, prepared once, and on the broker's disk before a
turn names them.

Image parts of messages are converted to the form that they have in dataset rows: a reference to the image by the sha256
of its source (`april.data.row_images`), so that equal requests are recognised by their messages.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

from april.agents.conversation_tree import ConversationTree, Refusal, SessionImage
from april.config import Config, ConfigError
from april.data.images import PROMPT_IMAGES, ImageRule, prepare
from april.data.messages import IMAGE, Message, image_sources
from april.data.row_images import DATA_URL, IMAGE_TYPES, base64_bytes, data_url_bytes
from april.data.rows import BadRow, excerpt
from april.data.tokenizer import Tokenizer
from april.workers.engines import ENGINES

KNOWN_S = 300.0
"""Seconds for which an image is not sent again after the broker has stored it; the broker keeps it longer than that."""
PREPARED_AT_ONCE = 4
"""Most images that are prepared or sent at once, each of which may take 200 MB."""
KeepImage = Callable[[str, bytes], Awaitable[str]]
"""Type of `BrokerLink.keep_image`: (name, PNG file) -> why the image is not kept, "" if it is on the broker's disk."""


async def kept_by_nobody(name: str, png: bytes) -> str:
    """A `KeepImage` function for a gateway without a broker: it keeps nothing and reports no failure."""
    return ""


class RequestImages:
    """Images in the requests of one agents process.

    sources = await images.take(body)                   # the body's images become canonical parts
    await images.show(session, messages, sources)       # `session.images` has those of the messages
    """

    def __init__(self, rule: ImageRule | None, why_none: str = "", patience_s: float = 600.0):
        """`rule`: how the policy takes images; None if the run takes none. A request with images is then refused, with
        `why_none` as the reason. `patience_s`: longest wait for the broker to store an image, seconds."""
        self.rule, self.why_none, self.patience_s = rule, why_none, patience_s
        self.keep: KeepImage = kept_by_nobody
        self._known: dict[str, SessionImage] = {}
        """Images that the broker has stored, by the sha256 of their source; oldest first."""
        self._under_way: dict[str, asyncio.Task[SessionImage]] = {}
        self._room = asyncio.Semaphore(PREPARED_AT_ONCE)

    @classmethod
    def of(cls, config: Config, tokenizer: Tokenizer) -> "RequestImages":
        engine, patience_s = config.worker.engine, config.broker.patience_s
        if engine in ENGINES.shipped and not ENGINES.find(engine).takes_images:
            return cls(None, f"key 'worker.engine' = {engine!r} takes no images", patience_s)
        try:
            return cls(tokenizer.image_rule, "the policy takes no images", patience_s)
        except ConfigError as error:
            return cls(None, str(error), patience_s)

    async def take(self, body: dict[str, Any]) -> dict[str, bytes]:
        """Replace each image in a request's body by a message part that names the image by the sha256 of its source,
        the file that was sent. Returns the sources by their sha256. Raises Refusal."""
        found = list(parts_with_images(body))
        if not found:
            return {}
        if self.rule is None:
            raise Refusal("invalid_image", f"{self.why_none}, and this request has one; leave it out")
        check_number(len(found))
        try:
            return await asyncio.to_thread(make_canonical, found)
        except BadRow as error:
            raise Refusal("invalid_image", str(error)) from None

    async def show(self, session: ConversationTree, messages: list[Message], sources: dict[str, bytes]) -> None:
        """Add all images of `messages`, those of a call, to the session, and have the broker keep those that no turn of
        the session names yet. `sources`: as `take` returns them. Raises Refusal."""
        shown = image_sources(messages)
        if not shown:
            return
        check_number(len(shown))
        now, named = asyncio.get_running_loop().time(), session.named_images
        known = session.images
        missing = [
            source for source in dict.fromkeys(shown)
            if source not in known or (known[source].name not in named and known[source].kept_until <= now)
        ]  # fmt: skip
        if absent := [source for source in missing if source not in sources]:
            raise Refusal("invalid_image", f"image {absent[0]} is not in this request; send it again")
        for image in await asyncio.gather(*(self._kept(source, sources[source]) for source in missing)):
            session.images[image.source] = image

    async def _kept(self, source: str, data: bytes) -> SessionImage:
        """Prepare the image file `data` and wait until the broker has stored it. `source`: sha256 of the file, in hex;
        concurrent requests with the same image share the work."""
        now = asyncio.get_running_loop().time()
        for old in [old for old, image in self._known.items() if image.kept_until <= now]:
            del self._known[old]
        if source in self._known:
            return self._known[source]
        if source not in self._under_way:
            task = self._under_way[source] = asyncio.create_task(self._prepare(source, data))
            task.add_done_callback(lambda task: self._ended(source, task))
        return await asyncio.shield(self._under_way[source])

    def _ended(self, source: str, task: "asyncio.Task[SessionImage]") -> None:
        self._under_way.pop(source, None)
        if not task.cancelled() and task.exception() is None:
            self._known[source] = task.result()

    async def _prepare(self, source: str, data: bytes) -> SessionImage:
        assert self.rule is not None
        async with self._room:
            try:
                prepared = await asyncio.to_thread(prepare, data, self.rule)
            except (BadRow, ConfigError) as error:
                raise Refusal("invalid_image", str(error)) from None
            try:
                fault = await asyncio.wait_for(self.keep(prepared.name, prepared.png), self.patience_s)
            except TimeoutError:
                fault = f"the broker has not answered for {self.patience_s:g} s"
        if fault:
            raise Refusal("image_not_kept", f"the broker has not kept an image ({fault}); ask again", 503)
        kept_until = asyncio.get_running_loop().time() + KNOWN_S
        return SessionImage(source, prepared.name, prepared.tokens, kept_until)


def check_number(images: int) -> None:
    if images > PROMPT_IMAGES:
        reason = f"this conversation has {images} images, more than {PROMPT_IMAGES}; leave earlier ones out"
        raise Refusal("too_many_images", reason)


def parts_with_images(body: dict[str, Any]) -> Iterator[tuple[list[Any], int]]:
    """For each image in the messages of a request's body, in order: (list of message parts that contains it, its index
    in that list)."""
    for messages in (body.get("messages"), body.get("input")):
        for message in messages if isinstance(messages, list) else ():
            if isinstance(message, dict):
                yield from image_parts(message.get("content"))
                yield from image_parts(message.get("output"))


def image_parts(content: Any) -> Iterator[tuple[list[Any], int]]:
    for index, part in enumerate(content if isinstance(content, list) else ()):
        if isinstance(part, dict) and part.get("type") in IMAGE_TYPES:
            yield content, index
        elif isinstance(part, dict) and part.get("type") == "tool_result":
            yield from image_parts(part.get("content"))


def make_canonical(found: Sequence[tuple[list[Any], int]]) -> dict[str, bytes]:
    """Replace each image part by one that names the image by the sha256 of its source, the file that was sent. `found`:
    the parts, as `parts_with_images` yields them. Returns the sources by their sha256. Raises BadRow."""
    sources: dict[str, bytes] = {}
    for parts, index in found:
        data = source_of(parts[index])
        source = hashlib.sha256(data).hexdigest()
        sources[source] = data
        parts[index] = {"type": IMAGE, "image": source}
    return sources


def source_of(part: dict[str, Any]) -> bytes:
    """The bytes of the image file in `part`, an image part of a message in the form of any of the gateway's APIs.
    Raises BadRow."""
    match part:
        case {"type": "image", "source": {"type": "base64", "data": str(encoded)}}:
            return base64_bytes(encoded)
        case (
            {"type": "image", "source": {"type": "url", "url": str(url)}}
            | {"type": "image_url", "image_url": {"url": str(url)}}
            | {"type": "image_url" | "input_image", "image_url": str(url)}
        ):
            if url.startswith(DATA_URL):
                return data_url_bytes(url)
            raise BadRow(f"an image is at {excerpt(url)}, and April fetches nothing; send its file as a data: URL")
    raise BadRow(f"an image of type {part['type']!r} has no file in it; send that in base64, as this API has it")
