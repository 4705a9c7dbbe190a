"""Updates of weights over slow links: whole and as deltas, of one learner and several engines.

The learner and each engine have a network namespace of their own, all on one bridge, and each sends at most `--rate`.
The learner has one rank and random weights in bfloat16. Each version changes 1.2 % of the values by one unit in the
last place. `update_s_E` is the time from the call that publishes a version until E engines have loaded it,
`delta_update_s_E` the same with `weights.delta` = "auto", `chain_update_s_E` with all engines in one chain
(`weights.channel_size`). `raw_s_E` is that of a broadcast of as many bytes to as many
processes in one group, in buckets of the same size. `broadcast_ratio_E` is `raw_s_E` over `update_s_E`,
`chain_broadcast_ratio_E` over `chain_update_s_E`; `delta_update_ratio_E` is `update_s_E` over `delta_update_s_E`.

`publish_hidden_share` is the share of a publication that goes on while the learner computes, if its steps take twice as
long as a publication.

Needs root and iproute2.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import orjson
from common import Row, environment_of, parser, process, ratios, report, wait_for

TENSOR_VALUES = 2**22
CHANGED = 0.012
BUCKET_BYTES = 16 << 20
SUBNET = "10.78.0"
DEADLINE_S = 600.0
KINDS = {"update_s": {}, "delta_update_s": {"delta": "auto"}, "chain_update_s": {"channel_size": 64}}
"""Keys of `[weights]` of each kind of update."""
RATIOS = (
    ("broadcast_ratio", "raw_s", "update_s"),
    ("chain_broadcast_ratio", "raw_s", "chain_update_s"),
    ("delta_update_ratio", "update_s", "delta_update_s"),
)
"""Rows that are one time over another, to as many engines."""


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument(
        "--mib", type=int, default=1024, help="of weights; each engine takes six times as much [1024]"
    )
    arguments.add_argument("--engines", type=int, nargs="+", default=[1, 4, 8], help="in ascending order [1 4 8]")
    arguments.add_argument("--rate", default="1gbit", help="of each host's link, in tc's notation [1gbit]")
    arguments.add_argument("--turns", type=int, default=3, help="versions of each kind to as many engines [3]")
    given = arguments.parse_args()
    turns, mib = (1, 64) if given.quick else (given.turns, given.mib)
    with (
        tempfile.TemporaryDirectory(prefix="april-weights-") as made,
        hosts(max(given.engines) + 1, given.rate) as names,
    ):
        measured = measure(Path(made), names, given.engines, mib, turns)
    rows = [Row(name, values, "s") for name, values in measured.items() if "_s_" in name]
    least, most = given.engines[0], given.engines[-1]
    pairs = [(f"{name}_{n}", f"{over}_{n}", f"{under}_{n}") for name, over, under in RATIOS for n in given.engines]
    pairs += [(f"{kind}_{most}_over_{least}", f"{kind}_{most}", f"{kind}_{least}") for kind in KINDS]
    rows += [Row(name, ratios(measured[over], measured[under]), "of the other") for name, over, under in pairs]
    rows.append(Row("publish_hidden_share", measured["hidden"], "of a publication"))
    rows.append(Row("delta_bytes_share", measured["share"], "of a whole version"))
    report(rows, given.json, mib=mib, rate=given.rate)


@contextlib.contextmanager
def hosts(count: int, rate: str) -> Iterator[list[str]]:
    """Network namespaces with addresses of one subnet, each of which sends at most `rate`."""
    names, switch = [f"april-bench-{os.getpid()}-{i}" for i in range(count)], f"april-bench-{os.getpid()}-switch"

    def ip(*words: str, at: str = "") -> None:
        subprocess.run(["ip", *(["-n", at] if at else []), *words], check=True)

    try:
        ip("netns", "add", switch)
        ip("link", "add", "bridge", "type", "bridge", at=switch)
        ip("link", "set", "bridge", "up", at=switch)
        for i, name in enumerate(names):
            ip("netns", "add", name)
            ip("link", "add", f"port{i}", "type", "veth", "peer", "name", "eth0", "netns", name, at=switch)
            ip("link", "set", f"port{i}", "master", "bridge", "up", at=switch)
            ip("addr", "add", f"{address(i)}/24", "dev", "eth0", at=name)
            ip("link", "set", "eth0", "up", at=name)
            ip("link", "set", "lo", "up", at=name)
            shape = ["root", "tbf", "rate", rate, "burst", "256k", "latency", "50ms"]
            subprocess.run(["tc", "-n", name, "qdisc", "add", "dev", "eth0", *shape], check=True)
        yield names
    finally:
        for name in [*names, switch]:
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)


def address(host: int) -> str:
    return f"{SUBNET}.{10 + host}"


def measure(folder: Path, names: list[str], engines: list[int], mib: int, turns: int) -> dict[str, list[float]]:
    """What the learner has measured, by name."""
    with contextlib.ExitStack() as running:

        def begin(host: int, *words: object) -> subprocess.Popen:
            command = ["ip", "netns", "exec", names[host], sys.executable, __file__, *words, folder]
            return running.enter_context(process(command, folder / f"host-{host}.log", env=environment_of(1)))

        learner, there = begin(0, "learner", mib, turns, ",".join(map(str, engines))), 0
        for count in engines:
            wait_for((folder / f"wanted_{count}").exists, f"a learner for {count} engines", learner, 900)
            for number in range(there, count):
                begin(number + 1, "engine", number, turns)
            there = count
        try:
            wait_for((folder / "result.json").exists, "the figures", learner, 1500)
        except SystemExit:
            sys.exit("".join(path.read_text()[-2000:] for path in sorted(folder.glob("*.log"))))
        return orjson.loads((folder / "result.json").read_bytes())


# --- the processes ----------------------------------------------------------------------------------------------------


def section(kind: str):
    from april.config import WeightsSection

    keys = KINDS[kind] | {"publish_deadline_s": DEADLINE_S, "transfer_deadline_s": DEADLINE_S, "join_deadline_s": 60.0}
    return WeightsSection(host=address(0), **keys)


def raw_group(host: str, port: int, rank: int, count: int):
    """A gloo group of the learner and so many engines."""
    import torch.distributed as dist

    store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=DEADLINE_S))
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=DEADLINE_S)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address(rank))]
    return dist.ProcessGroupGloo(dist.PrefixStore(f"raw-{count}/", store), rank, count + 1, options)


def broadcast_raw(group, data) -> float:
    """Seconds until all have received `data` from the learner."""
    from april.util import clock
    from april.weights import channel

    group.barrier().wait()
    began = time.perf_counter()
    channel.broadcast(group, data.split(BUCKET_BYTES), None, clock.now() + DEADLINE_S)
    group.barrier().wait()
    return time.perf_counter() - began


def put(path: Path, content: bytes) -> None:
    path.with_suffix(".partial").write_bytes(content)
    path.with_suffix(".partial").rename(path)


def learner(mib: int, turns: int, engines: list[int], folder: Path) -> None:
    import torch

    from april.learner.prefetch import WeightSender
    from april.weights.part_transfer import SnapshotWithDelta
    from april.weights.publisher import WeightPublisher
    from april.wire.message import Version

    torch.set_num_threads(1)
    weights = {f"layers.{i}": torch.randn(TENSOR_VALUES).bfloat16() for i in range((mib << 20) // TENSOR_VALUES // 2)}
    publishers = {kind: WeightPublisher(section(kind), "bench", "cpu") for kind in KINDS}
    plain = publishers["update_s"]
    put(folder / "addresses", orjson.dumps([[publishers[kind].address for kind in KINDS], *plain.store[1:], mib]))
    found: dict[str, list[float]] = {"hidden": [], "share": []}
    step = 0
    for count in engines:
        (folder / f"wanted_{count}").touch()
        for publisher in publishers.values():
            while sum(each.state == "ready" for each in list(publisher._channels.values())) < count:
                time.sleep(0.01)
        while sum(each.is_linked for each in list(publishers["chain_update_s"]._channels.values())) < count - 1:
            time.sleep(0.01)
        for turn in range(turns + 1):
            step += 1
            for tensor in weights.values():
                tensor.view(torch.int16)[torch.rand(TENSOR_VALUES) < CHANGED] ^= 1
            for name, publisher in publishers.items():
                began = time.perf_counter()
                figures = publisher.publish(Version(0, step), weights)
                assert figures["publish_workers"] == count, figures
                if turn:  # in the first there is no base
                    found.setdefault(f"{name}_{count}", []).append(time.perf_counter() - began)
                    assert figures["publish_deltas"] == (count if name == "delta_update_s" else 0), figures
                    if name == "chain_update_s":
                        assert figures["publish_sent_bytes"] == figures["publish_bytes"], figures
        sent = publishers["delta_update_s"]._snapshot
        assert isinstance(sent, SnapshotWithDelta)
        found["share"].append(len(sent.delta.encoded(sent)) / sent.data.numel())
        (folder / f"raw_{count}").touch()
        group = raw_group(*plain.store, 0, count)
        data = torch.zeros(mib << 20, dtype=torch.uint8)
        found[f"raw_s_{count}"] = [broadcast_raw(group, data) for _ in range(turns)]
    sender = WeightSender(plain, 0, 0)
    for _ in range(turns):
        step += 1
        sender.start(step, weights, None)
        time.sleep(2 * found[f"update_s_{engines[-1]}"][-1])
        figures = sender.finish()
        found["hidden"].append(1 - figures["publish_wait_s"] / figures["publish_s"])
    put(folder / "result.json", orjson.dumps(found))


def engine(number: int, turns: int, folder: Path) -> None:
    import torch

    from april.weights.receiver import WeightReceiver

    torch.set_num_threads(1)
    addresses, port, mib = orjson.loads((folder / "addresses").read_bytes())
    receivers = [WeightReceiver(section(kind), f"e{number}-{kind}", f"e{number}", "cpu") for kind in KINDS]
    for receiver, at in zip(receivers, addresses, strict=True):
        receiver.connect(at)
    done = set[Path]()
    while not (folder / "result.json").exists():
        for receiver in receivers:
            if staged := receiver.take():
                receiver.loaded(staged.version)
                del staged
        for path in set(folder.glob("raw_*")) - done:
            done.add(path)
            count = int(path.name.removeprefix("raw_"))
            if number < count:
                group = raw_group(address(0), port, number + 1, count)
                data = torch.empty(mib << 20, dtype=torch.uint8)
                for _ in range(turns):
                    broadcast_raw(group, data)
                del data
        time.sleep(0.002)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["learner", mib, turns, engines, folder]:
            learner(int(mib), int(turns), [int(each) for each in engines.split(",")], Path(folder))
        case ["engine", number, turns, folder]:
            engine(int(number), int(turns), Path(folder))
        case _:
            main()
