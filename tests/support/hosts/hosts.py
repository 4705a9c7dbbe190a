"""Hosts made of network namespaces on one machine, with names and addresses of their own, and Slurm on them.

Needs root, iproute2, and for Slurm munge and slurm-wlm.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.support.run_processes import wait_until

PREFIX = "april-hosts"
OWNER = os.getpid()
"""Process id in the names of the hosts, since other processes may have hosts of their own at the same time."""
SUBNET = "10.77.0"
SWITCH = f"{PREFIX}-{OWNER}-switch"
SLURM_CONFIG = """
ClusterName=april
SlurmctldHost={first}({first_address})
SlurmctldPort=16817
SlurmdPort=16818
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={state}/munge.sock
CryptoType=crypto/munge
StateSaveLocation={state}/state
SlurmdSpoolDir={state}/spool-%n
SlurmctldPidFile={state}/slurmctld.pid
SlurmdPidFile={state}/slurmd-%n.pid
SlurmctldLogFile={state}/slurmctld.log
SlurmdLogFile={state}/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
SlurmdTimeout=30
KillWait=5
SlurmdParameters=config_overrides
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
PartitionName=first Nodes={first} MaxTime=INFINITE State=UP
PartitionName=others Nodes={others} MaxTime=INFINITE State=UP
"""


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def name_of(index: int) -> str:
    """Name of a host and of its network namespace."""
    return f"{PREFIX}-{OWNER}-{index}"


@dataclass(frozen=True)
class Link:
    """Quality of the network link between each host and all others; without a `Link`, the network is as fast as the
    machine."""

    delay_s: float = 0.0
    """One-way delay (seconds)."""
    loss: float = 0.0
    """Share of the frames that are lost (0 to 1)."""
    rate: str = ""
    """Bandwidth in tc's notation, such as 10mbit; empty: unlimited."""


class Hosts:
    """Simulated hosts `names`, each a network namespace, all on one network; host k has the address `address(k)`."""

    def __init__(self, count: int, state: Path, link: Link | None = None, own: Path | None = None):
        """`own`: a folder of which each host has a separate copy; all other folders are shared by the hosts."""
        self.own = own
        self.names = [name_of(index) for index in range(count)]
        self.state, self.link = state, link
        self.switch: subprocess.Popen | None = None
        """Process that forwards frames between hosts with delay and loss; None without a `link`: a kernel bridge
        forwards them."""

    def address(self, index: int) -> str:
        return f"{SUBNET}.{10 + index}"

    def command(self, index: int, *command: str) -> list[str]:
        """Command line that runs `command` on a host, with the host's name and an /etc/hosts of all hosts."""
        setup = f"hostname {self.names[index]}; mount --bind {self.state}/hosts /etc/hosts; "
        if self.own:
            self.disk(index).mkdir(exist_ok=True)
            self.own.mkdir(parents=True, exist_ok=True)
            setup += f"mount --bind '{self.disk(index)}' '{self.own}'; "
        setup += 'exec "$@"'
        inside = ["nsenter", f"--net=/run/netns/{self.names[index]}", "unshare", "-u", "-m"]
        return [*inside, "bash", "-c", setup, "--", *command]

    def disk(self, index: int) -> Path:
        """Folder that holds the host's separate copy of `own`."""
        return self.state / f"disk-{index}"

    def make(self) -> None:
        self.remove()
        lines = ["127.0.0.1 localhost", *(f"{self.address(i)} {name}" for i, name in enumerate(self.names))]
        (self.state / "hosts").write_text("\n".join(lines) + "\n")
        for name in self.names:
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        if self.link is None:
            self._plug_into_bridge()
        else:
            self._plug_into_switch(self.link)
        for index, name in enumerate(self.names):
            run("ip", "-n", name, "addr", "add", f"{self.address(index)}/24", "dev", "eth0")
            run("ip", "-n", name, "link", "set", "eth0", "up")

    def _plug_into_bridge(self) -> None:
        run("ip", "netns", "add", SWITCH)
        run("ip", "-n", SWITCH, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", SWITCH, "link", "set", "bridge", "up")
        for index, name in enumerate(self.names):
            pair = ["type", "veth", "peer", "name", "eth0", "netns", name]
            run("ip", "-n", SWITCH, "link", "add", f"port{index}", *pair)
            run("ip", "-n", SWITCH, "link", "set", f"port{index}", "master", "bridge", "up")

    def _plug_into_switch(self, link: Link) -> None:
        command = [sys.executable, "-m", "tests.support.hosts.switch", str(link.delay_s), str(link.loss), *self.names]
        self.switch = subprocess.Popen(
            command, cwd=Path(__file__).parents[3], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.switch.stdout is not None and self.switch.stdout.readline() == "ready\n"
        if link.rate:
            limit = ["root", "tbf", "rate", link.rate, "burst", "256k", "latency", "100ms"]
            for name in self.names:
                run("tc", "-n", name, "qdisc", "add", "dev", "eth0", *limit)

    def cut(self, index: int) -> None:
        """Cut the host off the network silently: frames to and from it are dropped, connections are not closed."""
        if self.switch:
            self._tell_switch("cut", index)
        else:
            run("ip", "-n", SWITCH, "link", "set", f"port{index}", "nomaster")

    def mend(self, index: int) -> None:
        if self.switch:
            self._tell_switch("mend", index)
        else:
            run("ip", "-n", SWITCH, "link", "set", f"port{index}", "master", "bridge")

    def _tell_switch(self, order: str, index: int) -> None:
        assert self.switch is not None and self.switch.stdin is not None
        self.switch.stdin.write(f"{order} {self.names[index]}\n")
        self.switch.stdin.flush()

    def remove(self) -> None:
        """Remove the hosts with all their processes, also those of an earlier set whose owner is gone."""
        if self.switch:
            self.switch.communicate()
        for line in run("ip", "netns", "list").splitlines():
            if (name := line.split()[0]).startswith(PREFIX) and is_free(owner=int(name.split("-")[2])):
                for process in run("ip", "netns", "pids", name).split():
                    with suppress(ProcessLookupError):
                        os.kill(int(process), signal.SIGKILL)
                run("ip", "netns", "del", name)


def is_free(owner: int) -> bool:
    """Whether hosts made by process `owner` may be removed: it is this process, or has ended."""
    return owner == OWNER or not Path(f"/proc/{owner}").exists()


@contextmanager
def hosts(count: int, state: Path, link: Link | None = None, own: Path | None = None):
    made = Hosts(count, state, link, own)
    made.make()
    try:
        yield made
    finally:
        made.remove()


@contextmanager
def slurm(made: Hosts, cores: int = 8):
    """Context manager with a Slurm cluster over all hosts; gives the environment in which Slurm's commands, run on the
    first host, find it."""
    state = made.state
    nodes = [
        f"NodeName={name} NodeAddr={made.address(index)} CPUs={cores} Boards=1 SocketsPerBoard=1 "
        f"CoresPerSocket={cores} ThreadsPerCore=1 RealMemory=64000 State=UNKNOWN"
        for index, name in enumerate(made.names)
    ]
    config = state / "slurm.conf"
    (state / "state").mkdir()
    first, *others = made.names
    config.write_text(
        SLURM_CONFIG.format(
            first=first, others=",".join(others), first_address=made.address(0), state=state, nodes="\n".join(nodes)
        )
    )
    environment = os.environ | {"SLURM_CONF": str(config)}
    key = state / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    with ExitStack() as stack:
        daemons = []

        def start(index: int, *command: str) -> None:
            with (state / f"daemon-{len(daemons)}.log").open("wb") as log:
                daemon = subprocess.Popen(
                    made.command(index, *command), stdout=log, stderr=log, env=environment, start_new_session=True
                )
            daemons.append(daemon)
            stack.callback(end, daemon)

        munge = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={state}/munge.sock"]
        start(
            0, *munge, f"--pid-file={state}/munged.pid", f"--log-file={state}/munged.log", f"--seed-file={state}/seed"
        )
        wait_until((state / "munge.sock").exists)
        start(0, "slurmctld", "-D", "-i")
        for index, name in enumerate(made.names):
            (state / f"spool-{name}").mkdir()
            start(index, "slurmd", "-D", "-N", name)

        def idle() -> bool:
            told = subprocess.run(
                made.command(0, "sinfo", "--noheader", "--partition=main", "--format=%t %D"),
                capture_output=True,
                text=True,
                env=environment,
            )
            return told.stdout.split() == ["idle", str(len(made.names))]

        wait_until(idle)
        yield environment


def end(process: subprocess.Popen) -> None:
    process.terminate()
    deadline = time.monotonic() + 10
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    if process.poll() is None:
        process.kill()
    process.wait()
