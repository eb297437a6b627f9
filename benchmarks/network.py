"""Hosts on one machine: network namespaces, each with a cable to a switch of a given rate.

A cable is a veth pair, the switch a bridge in a namespace of its own. Both ends of every cable are
limited, so that a host neither sends nor gets more than the rate, both at once.

Nothing of it has a name outside these namespaces, and nothing can stay: a namespace ends with the
processes in it, veth and bridge end with their namespace, and the kernel ends the processes with
the one that has started them, however that ends.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

INTERFACE = "eth0"  # of every host
MTU = 1500
# Ethernet, IP and TCP with its time stamps. (On a wire come 24 bytes between two frames.)
HEADERS = 14 + 20 + 32

# Frames leave a host up to ten at a time, as they do where a network card splits what TCP gives
# it: with single frames, two cores do not reach 1 Gbit/s. What is sent after a pause passes the
# limit in one burst, which must hold such a group, and should be little beside a message. With
# these two, plain sockets get 95 of 100 Mbit/s and 950 of 1000, both ways at once; the headers
# take the rest.
GROUP = 16_000
BURST = 32_768
QUEUE = "50ms"  # what a queue may hold, before it drops
# TCP's own, where the kernel has it: what a machine is set to differs.
CONGESTION = "cubic"

# The kernel ends what is started so when the thread that has started it ends.
BOUND_TO_PARENT = ["setpriv", "--pdeathsig", "KILL"]

# What is needed of the machine.
PROBE = f"""
ip link add name bridge type bridge
ip link add name port type veth peer name {INTERFACE}
ip link set {INTERFACE} gso_max_size {GROUP}
tc qdisc add dev {INTERFACE} root tbf rate 1mbit burst {BURST} latency {QUEUE}
"""


class NetworkError(Exception):
    """This machine does not allow it."""


def as_root(command: list[str]) -> list[str]:
    """The command, for the root of a user namespace of its own unless this is root."""
    return command if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", *command]


def problem() -> str:
    """Why there can be no hosts on this machine, or ""."""
    command = as_root([*BOUND_TO_PARENT, "unshare", "--net", "sh", "-e", "-c", PROBE])
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except OSError as error:
        return str(error)
    if done.returncode == 0:
        return ""
    return done.stderr.strip().rpartition("\n")[2] or f"the probe ended with {done.returncode}"


def become_root(module: str) -> None:
    """Runs ``python -m module`` again as root, where that is needed and possible."""
    if os.geteuid() != 0 and not problem():
        command = as_root([sys.executable, "-m", module, *sys.argv[1:]])
        os.execvp(command[0], command)


@dataclass(frozen=True)
class Traffic:
    """What has left a host's interface, in frames of at most MTU bytes."""

    frames: int
    wire_bytes: int

    @property
    def payload_bytes(self) -> int:
        """Without the headers. (A frame that only acknowledges has none.)"""
        return self.wire_bytes - HEADERS * self.frames

    def __sub__(self, before: Traffic) -> Traffic:
        return Traffic(self.frames - before.frames, self.wire_bytes - before.wire_bytes)


def traffic() -> Traffic:
    """Of the host on which this process runs, until now. The limit counts frames; the interface's
    tx_packets and tx_bytes know only of groups of frames, with one header each."""
    command = ["tc", "-s", "-j", "qdisc", "show", "dev", INTERFACE]
    told = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)[0]
    return Traffic(told["packets"], told["bytes"])


def congestion() -> str:
    """How TCP finds its rate between the hosts."""
    settings = Path("/proc/sys/net/ipv4")
    known = (settings / "tcp_available_congestion_control").read_text().split()
    default = (settings / "tcp_congestion_control").read_text().strip()
    return CONGESTION if CONGESTION in known else default


def bits_per_second(rate: str) -> float:
    """Of a rate as tc takes it: 100mbit, 1gbit."""
    for unit, factor in {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}.items():
        if rate.endswith(unit):
            return float(rate.removesuffix(unit)) * factor
    raise ValueError(f"{rate!r} is no rate, such as 100mbit or 1gbit")


class Network:
    """Hosts 0 to ``hosts`` - 1, joined by a switch, until it is left as a context manager.

    Raises NetworkError where the machine does not allow it.
    """

    def __init__(self, hosts: int, rate: str) -> None:
        if reason := problem():
            raise NetworkError(reason)
        if not 1 <= hosts <= 250:
            raise ValueError(f"expected 1 to 250 hosts, got {hosts}")
        self.processes: list[subprocess.Popen[bytes]] = []
        self.addresses = [f"10.0.0.{host + 1}" for host in range(hosts)]
        try:
            self.switch = self._namespace()
            self.hosts = [self._namespace() for _ in range(hosts)]
            limit = f"root tbf rate {rate} burst {BURST} latency {QUEUE}"
            self._run(self.switch, "ip link add name bridge type bridge")
            self._run(self.switch, "ip link set bridge up")
            for number, host in enumerate(self.hosts):
                self._connect(host, f"port{number}", self.addresses[number], limit)
        except BaseException:
            self.close()
            raise

    def start(
        self,
        host: int,
        command: list[str],
        *,
        env: dict[str, str] | None = None,
        pass_fds: list[int] | None = None,
    ) -> subprocess.Popen[bytes]:
        """A process on a host. A key that interrupts this one does not reach it."""
        words = [*BOUND_TO_PARENT, *self._on(self.hosts[host]), *command]
        started = subprocess.Popen(
            words,
            env=env,
            pass_fds=pass_fds or (),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.processes.append(started)
        return started

    def close(self) -> None:
        """Ends all its processes, and with them the rest."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()

    def __enter__(self) -> Network:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _namespace(self) -> int:
        """A new one; the process that holds it."""
        command = [*BOUND_TO_PARENT, "unshare", "--net", "sh", "-c", "echo; exec sleep infinity"]
        holder = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True
        )
        self.processes.append(holder)
        told: IO[bytes] | None = holder.stdout
        assert told is not None
        with told:
            if not told.readline():
                raise NetworkError("a process could not have a network namespace")
        return holder.pid

    def _on(self, holder: int) -> list[str]:
        return ["nsenter", f"--net=/proc/{holder}/ns/net"]

    def _run(self, holder: int, command: str) -> None:
        words = [*self._on(holder), *command.split()]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise NetworkError(f"{command}: {done.stderr.strip()}")

    def _connect(self, host: int, port: str, address: str, limit: str) -> None:
        ends = f"name {port} mtu {MTU} type veth peer name {INTERFACE} mtu {MTU} netns {host}"
        self._run(self.switch, f"ip link add {ends}")
        self._run(self.switch, f"ip link set {port} master bridge up")
        self._run(self.switch, f"tc qdisc add dev {port} {limit}")
        self._run(host, "ip link set lo up")
        self._run(host, f"ip link set {INTERFACE} gso_max_size {GROUP}")
        self._run(host, f"ip address add {address}/24 dev {INTERFACE}")
        self._run(host, f"ip link set {INTERFACE} up")
        self._run(host, f"tc qdisc add dev {INTERFACE} {limit}")
        net = f"10.0.0.0/24 dev {INTERFACE} src {address}"
        self._run(host, f"ip route replace {net} congctl {congestion()}")
