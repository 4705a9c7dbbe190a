"""Receives weights that the learner broadcasts directly to a paused server over its weight channel."""

from collections.abc import Callable

from april.weights.lane_messages import ChannelManifest
from april.weights.snapshot import server_buckets
from april.workers.engines.sglang.client import SGLangClient
from april.workers.engines.sglang.weights import UPDATE_S, within_session


async def receive_broadcast(
    client: SGLangClient, manifest: ChannelManifest, post: Callable[[], None], change: dict
) -> None:
    """Have the paused server receive the broadcasts of a manifest; `post` tells the learner to begin.

    `change`, and the errors raised: as for `WeightPush.load`.
    """
    await within_session(client, receive_buckets(client, manifest, post, change))


async def receive_buckets(
    client: SGLangClient, manifest: ChannelManifest, post: Callable[[], None], change: dict
) -> None:
    post()
    parts = server_buckets(manifest.tensors, manifest.bucket_bytes)
    for heads in parts:
        body = {
            "names": [head.name for head in heads],
            "dtypes": [head.dtype for head in heads],
            "shapes": [head.shape for head in heads],
            "group_name": manifest.channel,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        await client.call("/update_weights_from_distributed", body | (change if heads is parts[-1] else {}), UPDATE_S)
