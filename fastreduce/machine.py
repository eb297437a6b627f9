"""What a machine is and has, as far as it matters here: facts for ``fastreduce doctor``, as JSON
has them. Sizes are bytes, speeds bytes/s, and None is what there is none of, or no limit.

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
from itertools import permutations
from pathlib import Path, PurePosixPath
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor

import fastreduce
from fastreduce import _C, cuda, policy, rendezvous, tuning

Facts = dict[str, Any]

# Limits from here on are none: version 1 of control groups has a number for that.
_NO_LIMIT = 1 << 60
# What the copies between two GPUs move: long enough to time from the host.
_COPY_BYTES = 64 * policy.MIB
_SMI_SECONDS = 5.0
# What changes how fastreduce, or what is below it, behaves.
_ENVIRONMENT = re.compile(
    "(FASTREDUCE|NCCL|GLOO|TP_SOCKET|TORCH_NCCL|TORCH_SYMM|OMP|MKL|PYTORCH_.*ALLOC|CUDA)_"
)


def describe() -> Facts:
    """This machine, as this process sees it."""
    return {
        "host": socket.gethostname(),
        "boot": rendezvous._boot_id(),  # tells running hosts apart
        "software": software_of(),
        "build": build_of(),
        "cpu": cpu_of(),
        "memory": memory_of(),
        "gpus": gpus_of(),
    }


# -- files ----------------------------------------------------------------------------------------


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace").strip()
    return ""


def _number(path: Path) -> int | None:
    """Of a file of /sys: 12, 32K, 4M."""
    found = re.match(r"(-?\d+)([KM]?)", _text(path))
    return int(found[1]) * {"": 1, "K": 1 << 10, "M": 1 << 20}[found[2]] if found else None


def _list(path: Path) -> list[int]:
    """The numbers of a list such as 0-3,8."""
    spans = [part.split("-") for part in _text(path).split(",") if part]
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


def memory_of(root: Path = Path("/")) -> Facts:
    sizes = dict(re.findall(r"(\w+):\s+(\d+) kB", _text(root / "proc/meminfo")))
    names = "memory.max", "memory.limit_in_bytes"
    limits = [_number(group / name) for group in _groups(root, "memory") for name in names]
    shm = None
    with contextlib.suppress(OSError):
        shm = shutil.disk_usage(root / "dev/shm")
    return {
        "total": int(sizes.get("MemTotal", 0)) << 10,
        "available": int(sizes.get("MemAvailable", 0)) << 10,
        "limit": min((n for n in limits if n is not None and n < _NO_LIMIT), default=None),
        "locked": _limit(resource.RLIMIT_MEMLOCK),  # that this process may lock
        "files": _limit(resource.RLIMIT_NOFILE),  # descriptors that it may open
        "shm_total": shm and shm.total,
        "shm_free": shm and shm.free,
    }


def _limit(what: int) -> int | None:
    soft = resource.getrlimit(what)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def cpu_of(root: Path = Path("/")) -> Facts:
    flags = re.search(r"^flags\s*:(.*)$", _text(root / "proc/cpuinfo"), re.M)
    quotas = []
    for group in _groups(root, "cpu"):
        share = _text(group / "cpu.max").split()
        share = share or [_text(group / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
        if all(each.isdigit() for each in share):  # else "max", or -1
            quotas.append(int(share[0]) / int(share[1]))
    system = root / "sys/devices/system"
    usable = sorted(os.sched_getaffinity(0))
    return {
        "model": tuning.processor(root),
        "online": len(_list(system / "cpu/online")) or os.cpu_count() or 1,
        "usable": usable,  # those on which this process may run
        "quota": min(quotas, default=None),  # how many cores' time its control group may use
        "nodes": {
            folder.name.removeprefix("node"): _list(folder / "cpulist")
            for folder in sorted((system / "node").glob("node[0-9]*"))
        },
        "caches": [  # of the first usable core, for data; and the cores that share each
            {"level": level, "nbytes": nbytes, "cores": _list(folder / "shared_cpu_list")}
            for folder in sorted((system / f"cpu/cpu{usable[0]}/cache").glob("index*"))
            if _text(folder / "type") != "Instruction"
            and (level := _number(folder / "level")) is not None
            and (nbytes := _number(folder / "size")) is not None
        ],
        "wide": [name for name in ("avx2", "avx512bw") if flags and name in flags[1].split()],
        "instruction_set": _C.instruction_set(),  # that the kernels use
    }


# -- software -------------------------------------------------------------------------------------


def software_of(root: Path = Path("/")) -> Facts:
    driver = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", _text(root / "proc/driver/nvidia/version"))
    nccl: Any = torch.cuda.nccl.version() if dist.is_nccl_available() else None
    return {
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "torch": str(torch.__version__),
        "torch_cuda": torch.version.cuda,  # that torch was built with, as NCCL
        "nccl": nccl and ".".join(map(str, nccl)),
        "driver": driver and driver[0],
        "system": platform.platform(),
        "environment": {k: v for k, v in sorted(os.environ.items()) if _ENVIRONMENT.match(k)},
    }


def build_of() -> Facts:
    host, device = _module("_C"), _module("_cuda")
    return {
        "version": fastreduce.__version__,
        "folder": str(Path(fastreduce.__path__[0]).resolve()),
        "host": _digest(host),  # by which builds are told apart
        "compiler": _compiler(host),
        "cuda": _digest(device) if device else None,
        "targets": cuda_targets(device),  # such as sm_90 and ptx_90
    }


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

    They lie in "fat binaries": a header (magic, version, its size 16, the size of what follows),
    then entries (kind, version, header's size, size ... and at byte 28 the architecture). One
    without PTX is the runtime's own.
    """
    kinds = {1: "ptx", 2: "sm"}
    found: set[tuple[str, int]] = set()
    for start in re.finditer(rb"\x50\xed\x55\xba\x01\x00\x10\x00(.{8})", module, re.S):
        at, end = start.end(), start.end() + int.from_bytes(start[1], "little")
        targets = set()
        with contextlib.suppress(struct.error, KeyError):  # not one, for all its magic
            while at < end:
                kind, skip, length, architecture = struct.unpack_from("<H2xIQ12xI", module, at)
                targets.add((kinds[kind], architecture))
                at += max(skip, 32) + length
            if any(kind == "ptx" for kind, _ in targets):
                found |= targets
    return [f"{kind}_{architecture}" for kind, architecture in sorted(found, reverse=True)]


# -- GPUs -----------------------------------------------------------------------------------------


def gpus_of(root: Path = Path("/")) -> Facts:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    problem, devices, pairs = cuda.problem(), [], []
    try:
        devices = [_gpu(root, index) for index in range(count)]
        pairs = [_pair(*both) for both in permutations(range(count), 2)]
    except RuntimeError as error:  # a GPU that is broken, or lent to somebody else
        devices, problem = [], str(error)
    return {
        "nodes": len(list((root / "dev").glob("nvidia[0-9]*"))),  # device files
        "problem": problem,  # why CUDA tensors cannot go through this library's kernels, or ""
        "devices": devices,  # that torch sees
        "pairs": pairs,
        "matrix": _matrix() if count > 1 else [],  # as nvidia-smi prints it
    }


def _gpu(root: Path, index: int) -> Facts:
    properties: Any = torch.cuda.get_device_properties(index)
    address = ""
    if hasattr(properties, "pci_bus_id"):  # torch 2.8 and newer
        numbers = properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
        address = "{:04x}:{:02x}:{:02x}.0".format(*numbers)
    on_bus = root / "sys/bus/pci/devices" / (address or "unknown")
    node = _number(on_bus / "numa_node")
    lanes, speed = (_text(on_bus / f"current_link_{each}") for each in ("width", "speed"))
    problem = ""
    try:
        rendezvous.describe_gpu(torch.device("cuda", index), ())
    except RuntimeError as error:
        problem = str(error)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "nbytes": properties.total_memory,
        "address": address,
        "node": None if node is None or node < 0 else node,
        "link": f"{lanes} x {speed}" if lanes else "",  # PCIe's, now
        "multicast": _multicast(index),
        "problem": problem,  # why the kernels cannot run on it, or ""
    }


def _multicast(index: int) -> bool | None:
    """Whether an NVLink switch can add and multiply for it; None where torch cannot tell."""
    with contextlib.suppress(Exception):  # torch's own, and not for everybody
        from torch._C import _distributed_c10d as core
        from torch._C._autograd import DeviceType

        return bool(core._SymmetricMemory.has_multicast_support(DeviceType.CUDA, index))
    return None


def _pair(reader: int, owner: int) -> Facts:
    """A copy, twice: the first one maps the memory. Where there is no peer access, the driver takes
    another way, and it is a slow one."""
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
    return {
        "reader": reader,
        "owner": owner,
        "access": torch.cuda.can_device_access_peer(reader, owner),
        "right": right,  # the copy arrived as it was; None if it failed
        "bandwidth": bandwidth,
    }


def _numbers(index: int) -> Tensor:
    return torch.arange(_COPY_BYTES // 8, device=torch.device("cuda", index))


def _matrix() -> list[str]:
    """What nvidia-smi says before its legend."""
    command = ["nvidia-smi", "topo", "-m"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SMI_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:  # there is none, or it hangs
        return [str(error)]
    plain = re.sub(r"\x1b\[[\d;]*m", "", done.stdout)
    return [line.expandtabs() for line in plain.strip("\n").split("\n\n")[0].splitlines()]
