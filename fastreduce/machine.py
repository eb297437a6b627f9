"""What a machine is and has, as far as it matters here: facts for ``fastreduce doctor``.

Nothing here raises for what is missing, and nothing is changed. What is read from files is read
below ``root``.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import platform
import re
import resource
import shutil
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor

from fastreduce import _C, cuda, policy, rendezvous, tuning

# Limits from here on are none: version 1 of control groups has a number for that.
_NO_LIMIT = 1 << 60
# What the copies between two GPUs move: long enough to time from the host.
_COPY_BYTES = 64 * policy.MIB
_SMI_SECONDS = 5.0
# What changes how fastreduce, or what is below it, behaves.
_ENVIRONMENT = re.compile(
    "(FASTREDUCE|NCCL|GLOO|TP_SOCKET|TORCH_NCCL|TORCH_SYMM|OMP|MKL|PYTORCH_.*ALLOC|CUDA)_"
)


@dataclass
class Cache:
    """Of one core: ``nbytes``, and the cores that share it."""

    level: int
    nbytes: int
    cores: list[int]


@dataclass
class Cpu:
    """
    Attributes:
        model: as the kernel names it.
        online: how many cores the machine has.
        usable: those on which this process may run.
        quota: how many cores' time its control group may use; None without a limit.
        nodes: NUMA node -> cores.
        caches: of the first usable core, for data.
        wide: ``avx2``, ``avx512bw``: what of these the processor has.
        instruction_set: that the kernels use.
    """

    model: str
    online: int
    usable: list[int]
    quota: float | None
    nodes: dict[str, list[int]]
    caches: list[Cache]
    wide: list[str]
    instruction_set: str


@dataclass
class Memory:
    """Bytes; None where there is no limit, or no /dev/shm.

    Attributes:
        total, available: of the machine.
        limit: of the control group.
        locked: that this process may lock.
        files: descriptors that it may open.
        shm_total, shm_free: of /dev/shm.
    """

    total: int
    available: int
    limit: int | None
    locked: int | None
    files: int | None
    shm_total: int | None
    shm_free: int | None


@dataclass
class Software:
    """
    Attributes:
        torch_cuda, nccl: the versions that torch was built with, or None.
        driver: of NVIDIA's kernel module, or None.
        environment: the variables that matter.
    """

    python: str
    numpy: str
    torch: str
    torch_cuda: str | None
    nccl: str | None
    driver: str | None
    system: str
    environment: dict[str, str]


@dataclass
class Build:
    """This package, as it was built.

    Attributes:
        host, cuda: by which builds are told apart; ``cuda`` is None without CUDA kernels.
        compiler: of the host's kernels.
        targets: of the CUDA kernels, such as ``sm_90`` and ``ptx_90``.
    """

    version: str
    folder: str
    host: str
    compiler: str
    cuda: str | None
    targets: list[str]


@dataclass
class Gpu:
    """
    Attributes:
        capability: such as "9.0".
        nbytes: of its memory.
        address: on the PCI bus, or "".
        node: the NUMA node that it is attached to, or None.
        link: PCIe lanes and their speed, now.
        multicast: an NVLink switch can add and multiply for it; None where torch cannot tell.
        problem: why the kernels cannot run on it, or "".
    """

    name: str
    capability: str
    nbytes: int
    address: str
    node: int | None
    link: str
    multicast: bool | None
    problem: str


@dataclass
class Pair:
    """Two GPUs.

    Attributes:
        access: ``reader`` may map the memory of ``owner``, says the driver.
        right: a copy arrived as it was; None if it failed.
        bandwidth: of that copy, bytes/s.
    """

    reader: int
    owner: int
    access: bool
    right: bool | None
    bandwidth: float | None


@dataclass
class Gpus:
    """
    Attributes:
        nodes: device files, /dev/nvidia0 ...
        problem: why CUDA tensors cannot go through this library's kernels, or "".
        devices: that torch sees.
        pairs: of them.
        matrix: what ``nvidia-smi topo -m`` prints; empty without it.
    """

    nodes: int
    problem: str
    devices: list[Gpu]
    pairs: list[Pair]
    matrix: list[str]


@dataclass
class Machine:
    """``boot``: the same for all processes of a running host, and for no others."""

    host: str
    boot: str
    software: Software
    build: Build
    cpu: Cpu
    memory: Memory
    gpus: Gpus


def describe() -> Machine:
    """This machine, as this process sees it."""
    return Machine(
        host=socket.gethostname(),
        boot=rendezvous._boot_id(),
        software=software_of(),
        build=build_of(),
        cpu=cpu_of(),
        memory=memory_of(),
        gpus=gpus_of(),
    )


# -- files ----------------------------------------------------------------------------------------


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace").strip()
    return ""


def _number(text: str) -> int | None:
    """Of a file of /sys or /proc: 12, 32K, 4M."""
    found = re.match(r"(-?\d+)([KM]?)", text)
    return int(found[1]) * {"": 1, "K": 1 << 10, "M": 1 << 20}[found[2]] if found else None


def _list(text: str) -> list[int]:
    """The numbers of a list such as 0-3,8."""
    spans = [part.split("-") for part in text.split(",") if part]
    return [n for span in spans for n in range(int(span[0]), int(span[-1]) + 1)]


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Where this process's control group, and those around it, may have their limits: in version 2
    or 1, seen from the host or from within a container."""
    base = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        for mount in (base / names, base / controller) if names else (base, base / "unified"):
            own = PurePosixPath(path)
            yield from (mount / str(group).lstrip("/") for group in (own, *own.parents))


def memory_of(root: Path = Path("/")) -> Memory:
    sizes = dict(re.findall(r"(\w+):\s+(\d+) kB", _text(root / "proc/meminfo")))
    limits = [
        number
        for group in _groups(root, "memory")
        for name in ("memory.max", "memory.limit_in_bytes")
        if (number := _number(_text(group / name))) is not None and number < _NO_LIMIT
    ]
    space = None
    with contextlib.suppress(OSError):
        space = os.statvfs(root / "dev/shm")
    return Memory(
        total=int(sizes.get("MemTotal", 0)) << 10,
        available=int(sizes.get("MemAvailable", 0)) << 10,
        limit=min(limits, default=None),
        locked=_limit(resource.RLIMIT_MEMLOCK),
        files=_limit(resource.RLIMIT_NOFILE),
        shm_total=None if space is None else space.f_blocks * space.f_frsize,
        shm_free=None if space is None else space.f_bavail * space.f_frsize,
    )


def _limit(what: int) -> int | None:
    soft = resource.getrlimit(what)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def cpu_of(root: Path = Path("/")) -> Cpu:
    flags = re.search(r"^flags\s*:(.*)$", _text(root / "proc/cpuinfo"), re.M)
    quotas = []
    for group in _groups(root, "cpu"):
        share = _text(group / "cpu.max").split()
        share = share or [_text(group / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
        if all(each.isdigit() for each in share):  # else "max", or -1
            quotas.append(int(share[0]) / int(share[1]))
    system = root / "sys/devices/system"
    usable = sorted(os.sched_getaffinity(0))
    caches = [
        Cache(level, size, _list(_text(folder / "shared_cpu_list")))
        for folder in sorted((system / f"cpu/cpu{usable[0]}/cache").glob("index*"))
        if _text(folder / "type") != "Instruction"
        and (level := _number(_text(folder / "level"))) is not None
        and (size := _number(_text(folder / "size"))) is not None
    ]
    return Cpu(
        model=tuning.processor(root),
        online=len(_list(_text(system / "cpu/online"))) or (os.cpu_count() or 1),
        usable=usable,
        quota=min(quotas, default=None),
        nodes={
            folder.name.removeprefix("node"): _list(_text(folder / "cpulist"))
            for folder in sorted((system / "node").glob("node[0-9]*"))
        },
        caches=caches,
        wide=[name for name in ("avx2", "avx512bw") if flags and name in flags[1].split()],
        instruction_set=_C.instruction_set(),
    )


# -- software -------------------------------------------------------------------------------------


def software_of(root: Path = Path("/")) -> Software:
    driver = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", _text(root / "proc/driver/nvidia/version"))
    nccl: Any = torch.cuda.nccl.version() if dist.is_nccl_available() else None
    return Software(
        python=platform.python_version(),
        numpy=numpy.__version__,
        torch=str(torch.__version__),
        torch_cuda=torch.version.cuda,
        nccl=nccl and ".".join(map(str, nccl)),
        driver=driver and driver[0],
        system=platform.platform(),
        environment={k: v for k, v in sorted(os.environ.items()) if _ENVIRONMENT.match(k)},
    )


def build_of() -> Build:
    import fastreduce

    host, device = _module("_C"), _module("_cuda")
    return Build(
        version=fastreduce.__version__,
        folder=str(Path(fastreduce.__path__[0]).resolve()),
        host=_digest(host),
        compiler=_compiler(host),
        cuda=_digest(device) if device else None,
        targets=cuda_targets(device),
    )


def _module(name: str) -> bytes:
    """The file of a compiled one; nothing if it was not built."""
    found = importlib.util.find_spec(f"fastreduce.{name}")
    return Path(found.origin).read_bytes() if found and found.origin else b""


def _compiler(module: bytes) -> str:
    """That made it, as it says itself. (One pattern for both is searched for 50 times as long.)"""
    for name, begin in (("GCC", rb"GCC: \([^)]*\) "), ("clang", rb"clang version ")):
        if found := re.search(begin + rb"([\d.]+)", module):
            return f"{name} {found[1].decode()}"
    return "unknown"


def _digest(module: bytes) -> str:
    return hashlib.sha256(module).hexdigest()[:12]


def cuda_targets(module: bytes) -> list[str]:
    """For what the kernels in a compiled module are.

    They lie in "fat binaries": a header (magic, version, its size, the size of what follows), then
    entries (kind, version, header's size, size ... and at byte 28 the architecture). One without
    PTX is the runtime's own.
    """
    kinds = {1: "ptx", 2: "sm"}
    found: set[tuple[str, int]] = set()
    for start in re.finditer(rb"\x50\xed\x55\xba", module):
        with contextlib.suppress(struct.error):
            _, _, header, size = struct.unpack_from("<IHHQ", module, start.start())
            at = start.start() + header
            end = at + size
            targets = set()
            while at < end:
                kind, _, skip, length = struct.unpack_from("<HHIQ", module, at)
                (architecture,) = struct.unpack_from("<I", module, at + 28)
                if kind not in kinds or skip == 0:
                    break  # not one, for all its magic
                targets.add((kinds[kind], architecture))
                at += skip + length
            if any(kind == "ptx" for kind, _ in targets):
                found |= targets
    return [f"{kind}_{architecture}" for kind, architecture in sorted(found, reverse=True)]


# -- GPUs -----------------------------------------------------------------------------------------


def gpus_of(root: Path = Path("/")) -> Gpus:
    found = Gpus(len(list((root / "dev").glob("nvidia[0-9]*"))), cuda.problem(), [], [], [])
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    asked = _ask_for_matrix() if count > 1 else None  # meanwhile, the GPUs are looked at
    try:
        found.devices = [_gpu(root, index) for index in range(count)]
        found.pairs = [_pair(r, o) for r in range(count) for o in range(count) if r != o]
    except RuntimeError as error:  # a GPU that is broken, or lent to somebody else
        found.devices, found.problem = [], str(error)
    if asked is not None:
        found.matrix = _matrix(asked)
    return found


def _gpu(root: Path, index: int) -> Gpu:
    properties: Any = torch.cuda.get_device_properties(index)
    address = ""
    if hasattr(properties, "pci_bus_id"):  # torch 2.8 and newer
        numbers = properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
        address = "{:04x}:{:02x}:{:02x}.0".format(*numbers)
    on_bus = root / "sys/bus/pci/devices" / (address or "unknown")
    node = _number(_text(on_bus / "numa_node"))
    lanes, speed = (_text(on_bus / f"current_link_{each}") for each in ("width", "speed"))
    problem, multicast = "", None
    try:
        rendezvous.describe_gpu(torch.device("cuda", index), ())
    except RuntimeError as error:
        problem = str(error)
    with contextlib.suppress(Exception):  # torch's own, and not for everybody
        multicast = _has_multicast(index)
    return Gpu(
        name=properties.name,
        capability=f"{properties.major}.{properties.minor}",
        nbytes=properties.total_memory,
        address=address,
        node=None if node is None or node < 0 else node,
        link=f"{lanes} x {speed}" if lanes else "",
        multicast=multicast,
        problem=problem,
    )


def _has_multicast(index: int) -> bool:
    from torch._C import _distributed_c10d as core
    from torch._C._autograd import DeviceType

    return bool(core._SymmetricMemory.has_multicast_support(DeviceType.CUDA, index))


def _pair(reader: int, owner: int) -> Pair:
    """A copy, twice: the first one maps the memory. Where there is no peer access, the driver takes
    another way, and it is a slow one."""
    access = torch.cuda.can_device_access_peer(reader, owner)
    right = bandwidth = None
    with contextlib.suppress(RuntimeError):
        source, target = _numbers(owner), torch.zeros_like(_numbers(reader))
        for _ in range(2):
            torch.cuda.synchronize(owner)
            torch.cuda.synchronize(reader)
            begin = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize(owner)
            torch.cuda.synchronize(reader)
            bandwidth = _COPY_BYTES / (time.perf_counter() - begin)
        right = torch.equal(target, _numbers(reader))
    return Pair(reader, owner, access, right, bandwidth)


def _numbers(index: int) -> Tensor:
    return torch.arange(_COPY_BYTES // 8, device=torch.device("cuda", index))


def _ask_for_matrix() -> subprocess.Popen[str] | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    return subprocess.Popen(
        [program, "topo", "-m"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


def _matrix(asked: subprocess.Popen[str]) -> list[str]:
    """The lines before its legend."""
    try:
        said, _ = asked.communicate(timeout=_SMI_SECONDS)
    except subprocess.TimeoutExpired:
        asked.kill()
        asked.wait()
        return [f"nvidia-smi has not answered within {_SMI_SECONDS:.0f} s"]
    plain = re.sub(r"\x1b\[[\d;]*m", "", said)
    return [line.expandtabs() for line in plain.strip("\n").split("\n\n")[0].splitlines()]
