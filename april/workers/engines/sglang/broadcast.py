"""Weights that the learner broadcasts to a server itself: the server takes part in the lane, while it is paused."""

from collections.abc import Callable

from april.weights.lane_messages import LaneManifest
from april.weights.snapshot import server_buckets
from april.workers.engines.sglang.client import SGLangClient
from april.workers.engines.sglang.weights import UPDATE_S, within_session


async def receive(client: SGLangClient, manifest: LaneManifest, post: Callable[[], None], change: dict) -> None:
    """Take the broadcasts of a manifest into the paused server; `post` tells the learner to begin.

    `change` as of `WeightPush.load`, and raises the same.
    """
    await within_session(client, take_buckets(client, manifest, post, change))


async def take_buckets(client: SGLangClient, manifest: LaneManifest, post: Callable[[], None], change: dict) -> None:
    post()
    parts = server_buckets(manifest.tensors, manifest.bucket_bytes)
    for heads in parts:
        body = {
            "names": [head.name for head in heads],
            "dtypes": [head.dtype for head in heads],
            "shapes": [head.shape for head in heads],
            "group_name": manifest.lane,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        await client.call("/update_weights_from_distributed", body | (change if heads is parts[-1] else {}), UPDATE_S)
