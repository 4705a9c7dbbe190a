"""A learning switch in user space, for links with delay or loss where the kernel cannot simulate them.

`python -m tests.support.hosts.switch DELAY_S LOSS HOST ...` creates a TAP device `eth0` in each host's network
namespace and prints `ready`. It forwards every frame after DELAY_S seconds, and drops the share LOSS of the frames.
Lines on standard input, `cut HOST` and `mend HOST`, disconnect and reconnect a host; at the end of the input the switch
exits.
"""

import ctypes
import fcntl
import heapq
import os
import random
import selectors
import struct
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x2, 0x1000
FRAME_BYTES = 65536
AT_ONCE = 64
"""Most frames read from one device before the next device is served."""


def main(delay_s: float, loss: float, hosts: Sequence[str]) -> None:
    switch = Switch(delay_s, loss, {host: open_tap(host) for host in hosts})
    print("ready", flush=True)
    switch.run()


def open_tap(host: str) -> int:
    """Create the TAP device `eth0` in a host's network namespace; returns its file descriptor. Reading gives the frames
    that the host sends, writing delivers frames to it."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/self/ns/net") as home, open(f"/run/netns/{host}") as there:
        if libc.setns(there.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"cannot enter network namespace {host}")
        tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", b"eth0", IFF_TAP | IFF_NO_PI))
        libc.setns(home.fileno(), 0)
    return tap


class Switch:
    def __init__(self, delay_s: float, loss: float, taps: dict[str, int]):
        self.delay_s, self.loss, self.taps = delay_s, loss, taps
        self.behind: dict[bytes, int] = {}
        """TAP device by the hardware addresses from which frames have arrived on it."""
        self.cut: set[int] = set()
        self.under_way: list[tuple[float, int, int, bytes]] = []
        """Heap of delayed frames: (time due, frame number, target device, frame)."""
        self.chance = random.Random(0)
        self.frames = 0

    def run(self) -> None:
        waiting = selectors.DefaultSelector()
        for device in (sys.stdin.fileno(), *self.taps.values()):
            waiting.register(device, selectors.EVENT_READ)
        while True:
            due = self.under_way[0][0] - time.monotonic() if self.under_way else None
            for key, _ in waiting.select(due if due is None else max(0.0, due)):
                if key.fd in self.taps.values():
                    self.read(key.fd)
                elif orders := os.read(key.fd, FRAME_BYTES).decode():
                    self.obey(orders)
                else:
                    return
            self.deliver()

    def obey(self, orders: str) -> None:
        for order in orders.splitlines():
            verb, host = order.split()
            change = self.cut.add if verb == "cut" else self.cut.discard
            change(self.taps[host])

    def read(self, device: int) -> None:
        for _ in range(AT_ONCE):
            try:
                frame = os.read(device, FRAME_BYTES)
            except BlockingIOError:
                return
            target, source = frame[:6], frame[6:12]
            self.behind[source] = device
            others = (other for other in self.taps.values() if other != device)
            for other in [self.behind[target]] if target in self.behind else others:
                if self.chance.random() >= self.loss and not {device, other} & self.cut:
                    self.frames += 1
                    heapq.heappush(self.under_way, (time.monotonic() + self.delay_s, self.frames, other, frame))

    def deliver(self) -> None:
        now = time.monotonic()
        while self.under_way and self.under_way[0][0] <= now:
            _, _, device, frame = heapq.heappop(self.under_way)
            with suppress(OSError):  # a full device, or one that is down, loses it
                os.write(device, frame)


if __name__ == "__main__":
    main(float(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
