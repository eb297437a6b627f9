"""``fastreduce doctor``: the facts it finds, what it makes of them, and what it prints."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import io
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import CONTEXT, nothing_left, shared_files
from test_cuda_build import dump

from fastreduce import diagnosis, doctor, doctor_text, machine, policy, rendezvous
from fastreduce.__main__ import main

GIB = 1 << 30
SOURCES = Path(__file__).resolve().parents[1]


# -- facts ----------------------------------------------------------------------------------------


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


def test_nothing_to_read_is_no_error(tmp_path):
    memory, cpu = machine.memory_of(tmp_path), machine.cpu_of(tmp_path)
    nothing = {"total": 0, "available": 0, "limit": None, "shm_total": None, "shm_free": None}
    assert memory == memory | nothing
    assert cpu == cpu | {"quota": None, "nodes": {}, "caches": [], "wide": []}
    assert cpu["usable"] == sorted(os.sched_getaffinity(0))
    assert machine.software_of(tmp_path)["driver"] is None


@pytest.mark.parametrize(
    "files, limit, quota",
    [
        (  # version 2, seen from within a container
            {
                "proc/self/cgroup": "0::/",
                "sys/fs/cgroup/memory.max": "1073741824",
                "sys/fs/cgroup/cpu.max": "150000 100000",
            },
            GIB,
            1.5,
        ),
        (  # the group around it is the tighter one
            {
                "proc/self/cgroup": "0::/pod/container",
                "sys/fs/cgroup/pod/memory.max": "1024",
                "sys/fs/cgroup/pod/container/memory.max": "2048",
                "sys/fs/cgroup/pod/cpu.max": "100000 100000",
                "sys/fs/cgroup/pod/container/cpu.max": "max 100000",
            },
            1024,
            1.0,
        ),
        (
            {
                "proc/self/cgroup": "0::/",
                "sys/fs/cgroup/memory.max": "max",
                "sys/fs/cgroup/cpu.max": "max 100000",
            },
            None,
            None,
        ),
        (  # version 1, its own path not visible
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/docker/1\n4:memory:/docker/1",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "4096",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "50000",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
            },
            4096,
            0.5,
        ),
        (
            {
                "proc/self/cgroup": "5:cpu:/a\n4:memory:/a",
                "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "9223372036854771712",
                "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000",
            },
            None,
            None,
        ),
    ],
    ids=["v2", "v2 nested", "v2 unlimited", "v1", "v1 unlimited"],
)
def test_limits_of_control_groups(tmp_path, files, limit, quota):
    tree(tmp_path, files)
    assert machine.memory_of(tmp_path)["limit"] == limit
    assert machine.cpu_of(tmp_path)["quota"] == quota


def test_cores_caches_and_nodes(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {9, 3})
    cache = "sys/devices/system/cpu/cpu3/cache"
    files = {
        "proc/cpuinfo": "model name : A CPU\nflags : fma avx2 avx512f",
        "sys/devices/system/cpu/online": "0-7,9",
        "sys/devices/system/node/node0/cpulist": "0-3",
        "sys/devices/system/node/node2/cpulist": "4-7,9",
        "sys/devices/system/node/has_cpu": "0,2",
    }
    for index, kind in enumerate(("Data", "Instruction", "Unified")):
        files |= {
            f"{cache}/index{index}/type": kind,
            f"{cache}/index{index}/level": str(1 + index // 2),
            f"{cache}/index{index}/size": ("48K", "32K", "2M")[index],
            f"{cache}/index{index}/shared_cpu_list": "3,7",
        }
    cpu = machine.cpu_of(tree(tmp_path, files))
    assert cpu == cpu | {"model": "A CPU", "online": 9, "usable": [3, 9], "wide": ["avx2"]}
    assert cpu["nodes"] == {"0": [0, 1, 2, 3], "2": [4, 5, 6, 7, 9]}
    assert cpu["caches"] == [
        {"level": 1, "nbytes": 48 << 10, "cores": [3, 7]},
        {"level": 2, "nbytes": 2 << 20, "cores": [3, 7]},
    ]


@pytest.mark.parametrize(
    "line",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build",
    ],
)
def test_driver(tmp_path, line):
    tree(tmp_path, {"proc/driver/nvidia/version": line})
    assert machine.software_of(tmp_path)["driver"] == "550.54.15"


def test_environment_that_matters(monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("SECRET_NCCL_TOKEN", "x")
    found = machine.software_of()["environment"]
    assert found["NCCL_DEBUG"] == "INFO" and "SECRET_NCCL_TOKEN" not in found


@pytest.mark.parametrize(
    "module, compiler",
    [
        (b"...GCC: (Debian 12.2.0-14) 12.2.0\0", "GCC 12.2.0"),
        (b"...Debian clang version 14.0.6\0", "clang 14.0.6"),
        (b"...", "unknown"),
    ],
)
def test_compiler(module, compiler):
    assert machine._compiler(module) == compiler


def test_targets_are_those_that_cuobjdump_finds():
    listed = dump("--list-elf", "--list-ptx")
    wanted = {f"sm_{n}" for n in re.findall(r"sm_(\d+)\.cubin", listed) if n != "75"}
    wanted |= {f"ptx_{n}" for n in re.findall(r"sm_(\d+)\.ptx", listed)}
    assert set(machine.build_of()["targets"]) == wanted


def test_targets_of_a_fat_binary():
    def entry(kind: int, architecture: int) -> bytes:
        head = [kind.to_bytes(2, "little"), b"\1\1", (64).to_bytes(4, "little")]
        head += [(8).to_bytes(8, "little"), bytes(12), architecture.to_bytes(4, "little")]
        return b"".join(head).ljust(64, b"\0") + b"payload."

    def fat(*entries: bytes) -> bytes:
        size = sum(map(len, entries)).to_bytes(8, "little")
        return b"\x50\xed\x55\xba\1\0\x10\0" + size + b"".join(entries)

    runtime, kernels = fat(entry(2, 75)), fat(entry(2, 80), entry(2, 90), entry(1, 90))
    assert machine.cuda_targets(b"junk" + runtime + b"junk" + kernels) == [
        *("sm_90", "sm_80", "ptx_90")
    ]
    assert machine.cuda_targets(runtime) == []
    # What only begins like one: cut off, of another kind, of no size.
    for other in (kernels[:20], fat(entry(1, 90), entry(3, 90)), fat(b"\1".ljust(64, b"\0"))):
        assert machine.cuda_targets(other) == []


SMI = """#!/bin/sh
[ "$*" = "topo -m" ] || exit 1
printf '\\t\\033[4mGPU0\\tGPU1\\tNUMA Affinity\\033[0m\\n'
printf 'GPU0\\t X \\tNV18\\t0\\nGPU1\\tNV18\\t X \\t1\\n\\nLegend:\\n\\n  X = Self\\n'
"""


@pytest.fixture
def gpus(monkeypatch, tmp_path):
    """Two of them, at /sys of ``tmp_path``, whose memory is the host's."""
    properties = [
        SimpleNamespace(
            name="NVIDIA H100",
            major=9,
            minor=0,
            total_memory=80 * GIB,
            pci_domain_id=0,
            pci_bus_id=0x1B + n,
            pci_device_id=0,
        )
        for n in range(2)
    ]
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "get_device_properties": properties.__getitem__,
        "can_device_access_peer": lambda reader, owner: True,
        "synchronize": lambda device: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(machine.cuda, "problem", lambda: "")
    monkeypatch.setattr(rendezvous, "describe_gpu", lambda device, limits: None)
    monkeypatch.setattr(machine, "_multicast", lambda index: True)
    monkeypatch.setattr(machine, "_numbers", lambda index: torch.arange(100))
    (tmp_path / "nvidia-smi").write_text(SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    device = "sys/bus/pci/devices/0000:1b:00.0"
    return tree(
        tmp_path,
        {
            "dev/nvidia0": "",
            "dev/nvidia1": "",
            "dev/nvidiactl": "",
            f"{device}/numa_node": "1",
            f"{device}/current_link_width": "16",
            f"{device}/current_link_speed": "32.0 GT/s PCIe",
            "sys/bus/pci/devices/0000:1c:00.0/numa_node": "-1",
        },
    )


def test_gpus(gpus):
    found = machine.gpus_of(gpus)
    first, second = found["devices"]
    assert (found["nodes"], found["problem"]) == (2, "")
    assert first == {
        "name": "NVIDIA H100",
        "capability": "9.0",
        "nbytes": 80 * GIB,
        "address": "0000:1b:00.0",
        "node": 1,
        "link": "16 x 32.0 GT/s PCIe",
        "multicast": True,
        "problem": "",
    }
    assert second == first | {"address": "0000:1c:00.0", "node": None, "link": ""}
    pairs = healthy()["machine"]["gpus"]["pairs"]
    assert [each | {"bandwidth": 370e9} for each in found["pairs"]] == pairs
    assert [line.split() for line in found["matrix"]] == [
        ["GPU0", "GPU1", "NUMA", "Affinity"],
        ["GPU0", "X", "NV18", "0"],
        ["GPU1", "NV18", "X", "1"],
    ]


def test_gpus_that_do_not_work(gpus, monkeypatch):
    def refuse(*_: object) -> None:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(rendezvous, "describe_gpu", refuse)
    # What lies in one memory arrives as something else in the other.
    monkeypatch.setattr(machine, "_numbers", lambda index: torch.arange(100) + index)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda reader, owner: reader == 0)
    monkeypatch.setenv("PATH", "")
    found = machine.gpus_of(gpus)
    assert [each["problem"] for each in found["devices"]] == ["no kernel image is available"] * 2
    assert [(p["access"], p["right"]) for p in found["pairs"]] == [(True, False), (False, False)]
    assert "No such file" in found["matrix"][0]
    monkeypatch.setattr(machine, "_numbers", refuse)
    assert [p["right"] for p in machine.gpus_of(gpus)["pairs"]] == [None, None]
    monkeypatch.setattr(torch.cuda, "get_device_properties", refuse)
    broken = machine.gpus_of(gpus)
    assert (broken["problem"], broken["devices"]) == ("no kernel image is available", [])


def test_a_silent_nvidia_smi(gpus, monkeypatch):
    monkeypatch.setattr(machine, "_SMI_SECONDS", 0.2)
    (gpus / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 60\n")
    assert "timed out after 0.2 seconds" in machine._matrix()[0]


# -- judgement ------------------------------------------------------------------------------------


# A machine of which nothing is to be said.
HEALTHY = """{
"host": "alpha", "boot": "1",
"software": {"python": "3.11.2", "numpy": "2.1.0", "torch": "2.13.0", "torch_cuda": "13.0",
    "nccl": "2.27.7", "driver": "580.65", "system": "Linux-x86_64", "environment": {}},
"build": {"version": "0.1.0", "folder": "/lib", "host": "aaaa", "compiler": "GCC 12.2.0",
    "cuda": "bbbb", "targets": ["sm_90", "ptx_90"]},
"cpu": {"model": "A CPU", "online": 8, "usable": [0, 1, 2, 3, 4, 5, 6, 7], "quota": null,
    "nodes": {"0": [0, 1, 2, 3], "1": [4, 5, 6, 7]},
    "caches": [{"level": 3, "nbytes": 33554432, "cores": [0, 1, 2, 3, 4, 5, 6, 7]}],
    "wide": ["avx2", "avx512bw"], "instruction_set": "avx512"},
"memory": {"total": 68719476736, "available": 64424509440, "limit": null, "locked": null,
    "files": 1024, "shm_total": 34359738368, "shm_free": 34359738368},
"gpus": {"nodes": 2, "problem": "", "devices": [
    {"name": "NVIDIA H100", "capability": "9.0", "nbytes": 85899345920, "address": "0000:1b:00.0",
     "node": 0, "link": "16 x 32", "multicast": true, "problem": ""},
    {"name": "NVIDIA H100", "capability": "9.0", "nbytes": 85899345920, "address": "0000:1c:00.0",
     "node": 0, "link": "16 x 32", "multicast": true, "problem": ""}],
  "pairs": [
    {"reader": 0, "owner": 1, "access": true, "right": true, "bandwidth": 370e9},
    {"reader": 1, "owner": 0, "access": true, "right": true, "bandwidth": 370e9}],
  "matrix": []}
}"""


def healthy(rank: int = 0, world_size: int = 2) -> dict:
    """A rank on it."""
    check = doctor.unknown(world_size, rank) | {
        "host": asdict(policy.Topology(True, 8, world_size)),
        "threads": 4,
        "gpus": asdict(policy.GpuTopology("switch", multicast=True)),
    }
    return {"rank": rank, "machine": json.loads(HEALTHY), "check": check}


def test_the_stand_in_has_the_keys_of_a_machine():
    def keys(facts: dict) -> dict:
        return {name: list(part) for name, part in facts.items() if isinstance(part, dict)}

    assert keys(machine.describe()) == keys(healthy()["machine"])


def changed(where: str, value: object, rank: dict | None = None) -> dict:
    """A rank, with one fact changed: machine.cpu.quota, or check.said."""
    facts = copy.deepcopy(rank or healthy())
    *path, last = where.split(".")
    place = functools.reduce(lambda d, key: d[int(key) if key.isdigit() else key], path, facts)
    place[last] = value
    return facts


FEW = [0]
UNKNOWN = diagnosis.remedy("something new")
# What is changed, what is then found, and a change of the same fact after which nothing is.
ALONE = [
    ("machine.software.torch", "2.5.1", "2.6.0", "wrong", "torch 2.5.1 is older"),
    ("machine.cpu.usable", FEW, [0, 1], "slow", "2 ranks share 1 of 8 cores"),
    ("machine.cpu.quota", 1.5, 8.0, "slow", "gives 1.5 cores' time to 2 ranks"),
    ("machine.cpu.quota", 7.0, None, "slow", "gives 7 cores' time to 2 ranks with 4 thread"),
    (
        "machine.software.environment",
        {"FASTREDUCE_ISA": "avx2"},
        {"FASTREDUCE_ISA": "avx512"},
        "slow",
        "keeps the kernels from using avx512",
    ),
    ("machine.cpu.instruction_set", "baseline", "avx2", "slow", "no AVX2"),
    ("machine.memory.shm_free", 64 << 20, GIB, "slow", "gradients of 30 MiB on each of 2"),
    ("machine.memory.shm_free", None, 2 * GIB, "slow", "gradients of 0 MiB"),
    ("machine.gpus.problem", "fastreduce was built without CUDA", "", "slow", "without CUDA"),
    ("machine.gpus.devices.0.problem", "no kernel image", "", "slow", "do not run on NVIDIA H100"),
    ("machine.software.nccl", None, "2.20.5", "wrong", "has no NCCL"),
    (
        "machine.gpus.pairs.0.access",
        False,
        True,
        "slow",
        "1 of 2 pairs of GPUs (1 to 0) have no peer",
    ),
    ("machine.gpus.pairs.1.right", False, None, "wrong", "(0 to 1) copy wrongly"),
    ("machine.gpus.devices.0.node", 2, 1, "none", ""),
    ("machine.cpu.usable", [4, 5], [0, 5], "slow", "any core of NUMA node 0"),
    ("check.error", "rank 1 belongs to another user", "", "wrong", "another user"),
    (
        "check.said",
        ["using the process group, because rank 1 runs in another network namespace than rank 0"],
        ["using the process group, because rank 1 runs on another host than rank 0"],
        "slow",
        "another network namespace",
    ),
]


@pytest.mark.parametrize("where, bad, good, kind, what", ALONE)
def test_what_is_wrong_with_a_machine_is_found(where, bad, good, kind, what):
    assert diagnosis.findings([healthy()]) == []
    assert diagnosis.findings([changed(where, good)]) == []
    found = diagnosis.findings([changed(where, bad)])
    if kind == "none":
        assert found == []
        return
    [finding] = found
    assert finding["kind"] == kind and what in finding["what"]
    assert finding["todo"] != UNKNOWN and finding["ranks"] == [0]


@pytest.mark.parametrize(
    "cuda, hidden, found",
    [
        (None, {}, "torch 2.13.0 is a build without CUDA"),
        ("13.0", {}, "CUDA does not work in torch; no driver"),
        ("13.0", {"CUDA_VISIBLE_DEVICES": ""}, None),
    ],
)
def test_gpus_that_torch_does_not_see(cuda, hidden, found):
    facts = changed("machine.gpus.devices", [])
    facts["machine"]["software"] |= {"torch_cuda": cuda, "environment": hidden}
    facts["machine"]["gpus"] |= {"problem": "no driver", "pairs": []}
    facts["check"] |= {"device": None, "gpus": None}
    assert [each["kind"] for each in diagnosis.findings([facts])] == ["wrong"] * (found is not None)
    for finding in diagnosis.findings([facts]):
        assert found in finding["what"] and finding["todo"] != UNKNOWN
    assert diagnosis.findings([changed("machine.gpus.nodes", 0, facts)]) == []


def test_without_avx2_only_x86_is_slow():
    arm = changed("machine.software.system", "Linux-aarch64")
    assert diagnosis.findings([changed("machine.cpu.instruction_set", "baseline", arm)]) == []


def test_a_remedy_for_every_reason_that_the_library_gives():
    """Or that is found here: those are tried one by one above and below."""
    texts = [
        path.read_text()
        for pattern in ("fastreduce/*.py", "csrc/*.cpp")
        for path in SOURCES.glob(pattern)
        if path.name != "diagnosis.py"
    ]
    keys = list(diagnosis.REMEDIES)
    found = keys[keys.index("is older than") :]
    for key, todo in diagnosis.REMEDIES.items():
        # CUDA says that one itself.
        assert key == "no kernel image" or key in found or any(key in each for each in texts), key
        assert diagnosis.remedy(f"rank 1: {key} 3") == todo
    assert "report" in UNKNOWN


DIFFERENT = [
    (
        "machine.build.version",
        "0.2.0",
        "wrong",
        "fastreduce differs between ranks: 0.1.0 on rank 0;",
    ),
    ("machine.build.host", "cccc", "wrong", "the build of the host's kernels differs"),
    ("machine.build.cuda", None, "wrong", "bbbb on rank 0; none on rank 1"),
    ("machine.software.torch", "2.12.0", "wrong", "torch differs between ranks"),
    ("machine.software.nccl", "2.20.5", "wrong", "NCCL differs between ranks"),
    ("machine.cpu.instruction_set", "avx2", "slow", "the instruction set differs"),
]


@pytest.mark.parametrize("where, value, kind, what", DIFFERENT)
def test_a_rank_that_differs_is_found(where, value, kind, what):
    ranks = [healthy(0), healthy(1)]
    assert diagnosis.findings(ranks) == []
    [finding] = diagnosis.findings([ranks[0], changed(where, value, ranks[1])])
    assert finding["kind"] == kind and what in finding["what"] and finding["todo"] != UNKNOWN


def test_ranks_that_share_a_gpu():
    ranks = [healthy(0), changed("check.device", 0, healthy(1))]
    [finding] = diagnosis.findings(ranks)
    assert finding["what"] == "ranks 0-1 use one GPU, 0000:1b:00.0" and finding["ranks"] == [0, 1]
    assert finding["todo"] != UNKNOWN
    elsewhere = changed("machine.boot", "2", ranks[1])
    assert diagnosis.findings([ranks[0], elsewhere]) == []


def test_findings_name_their_ranks_and_what_is_wrong_comes_first():
    ranks = [healthy(n, 4) for n in range(4)]
    for rank in ranks:
        rank["machine"]["gpus"]["devices"] *= 2
        rank["check"]["device"] = None
        rank["machine"]["software"]["environment"] = {"FASTREDUCE_ISA": "avx2"}
    ranks[2]["check"]["error"] = "it fails"
    assert [(each["kind"], each["ranks"]) for each in diagnosis.findings(ranks)] == [
        ("wrong", [2]),
        ("slow", [0, 1, 2, 3]),
    ]
    # Cores are those of all ranks of a host.
    for n, rank in enumerate(ranks):
        rank["machine"]["cpu"]["usable"] = [n // 2]
        rank["machine"]["software"]["environment"] = {}
    [_, slow] = diagnosis.findings(ranks)
    assert "4 ranks share 2 of 8 cores" in slow["what"]
    for n, rank in enumerate(ranks):
        rank["machine"]["boot"] = str(n // 2)
    [_, slow] = diagnosis.findings(ranks)
    assert "2 ranks share 1 of 8 cores" in slow["what"] and slow["ranks"] == [0, 1, 2, 3]


# -- paths ----------------------------------------------------------------------------------------


def named(ranks: list[dict]) -> list[tuple[str, int | None, str]]:
    return [(path["device"], path["largest"], path["algorithm"]) for path in diagnosis.paths(ranks)]


def test_paths_are_those_that_the_policy_chooses():
    for device, topology in (
        ("cpu", policy.Topology(True, 8, 2)),
        ("cuda", policy.GpuTopology("switch", multicast=True)),
    ):
        wanted = policy.crossovers(2, topology)
        found = [(size, name) for place, size, name in named([healthy()]) if place == device]
        assert found == [(size, name) for name, size in wanted] and len(found) > 1


def test_why_not_a_faster_path():
    slower = changed("check.gpus.multicast", False)
    slower["check"]["world_size"] = 8
    why = {
        path["algorithm"]: path["why"]
        for path in diagnosis.paths([slower])
        if path["device"] == "cuda"
    }
    assert "multimem would need multicast in the NVLink switch" in why["two_shot"]
    assert "would need" not in why["low_latency"]
    cards = changed("check.gpus.link", "pcie", slower)
    cards["check"]["gpus"]["bandwidth"] = 2e10
    [*_, last] = diagnosis.paths([cards])
    assert last["algorithm"] == "process_group" and "multimem would need NVLink" in last["why"]
    measured = changed("check.gpus.limits", [["two_shot", 4096], ["one_shot", None]])
    assert named([measured])[2:4] == [("cuda", 4096, "two_shot"), ("cuda", 524288, "one_shot")]
    assert "measured" in diagnosis.paths([measured])[2]["why"]
    host = [each for each in diagnosis.paths([healthy()]) if each["device"] == "cpu"]
    assert all("expected" in each["why"] for each in host) and len(host) == 2
    measured = changed("check.host.limits", [["one_shot", 65536], ["two_shot", None]])
    assert named([measured])[:2] == [("cpu", 65536, "one_shot"), ("cpu", None, "two_shot")]
    assert all("measured by tune" in each["why"] for each in diagnosis.paths([measured])[:2])


def test_paths_of_ranks_that_cannot_share():
    reason = "rank 1 runs on another host than rank 0"
    facts = changed("check.said", [f"using the process group, because {reason}"])
    facts["check"]["said"].append("CUDA tensors go through the process group, because so")
    facts["check"] |= {"host": asdict(policy.Topology(False, 0, 2)), "gpus": None}
    assert diagnosis.paths([facts]) == [
        {"device": "cpu", "largest": None, "algorithm": "process_group", "why": reason},
        {"device": "cuda", "largest": None, "algorithm": "process_group", "why": "so"},
    ]
    facts["check"]["error"] = "it fails"
    assert {device for device, _, _ in named([facts])} == {"cuda"}  # as they should be


def test_paths_of_gpus_that_were_not_tried(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    facts = changed("check.device", None)
    fast = diagnosis.expected_topology(facts["machine"]["gpus"])
    assert fast == policy.GpuTopology("switch", multicast=True, bandwidth=370e9)
    assert ("cuda", None, "process_group") in named([facts])
    for where, value in [
        ("machine.gpus.problem", "none"),
        ("machine.gpus.devices.1.problem", "none"),
        ("machine.gpus.pairs.0.access", False),
        ("machine.gpus.pairs.0.right", None),
    ]:
        gpus = changed(where, value, facts)["machine"]["gpus"]
        assert diagnosis.expected_topology(gpus) == policy.GpuTopology("none")
    one = changed("machine.gpus.devices", facts["machine"]["gpus"]["devices"][:1], facts)
    assert {device for device, _, _ in named([one])} == {"cpu"}


# -- text -----------------------------------------------------------------------------------------


def test_text_of_ranks_on_two_hosts():
    ranks = [healthy(0), healthy(1)]
    ranks[1]["machine"] |= {"host": "beta", "boot": "2"}
    ranks[1]["check"]["error"] = "it fails"
    text = doctor_text.text(doctor.report(ranks, [], together=True))
    rows = [line.split() for line in text.splitlines()]
    assert ["0", "alpha", "0-7", "avx512", "30", "GiB", "0:", "NVIDIA", "H100"] in [
        row[:9] for row in rows
    ]
    assert ["1", "beta", "0-7", "avx512", "30", "GiB", "1:", "NVIDIA", "H100", "failed"] in [
        row[:10] for row in rows
    ]
    assert "host         alpha (rank 0's), Linux" in text
    assert "2 pairs: peer access for 2, copies right for 2, the slowest at 370 GB/s" in text
    assert "to 256 KiB   low_latency" in text
    assert "WRONG  it fails (rank 1)\n    do: " in text
    assert max(map(len, text.splitlines())) <= 120 and "\x1b" not in text


def test_colours_are_the_only_difference():
    report = doctor.report([changed("check.error", "it fails")], [], together=False)
    coloured = doctor_text.text(report, colours=True)
    assert "\x1b[1;31mWRONG" in coloured
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == doctor_text.text(report)
    fine = doctor.report([healthy()], [], together=False)
    assert doctor_text.text(fine, colours=True).endswith("\x1b[1;32mAll right.\x1b[0m")


def test_many_findings_stay_within_a_screen():
    many = [{"kind": "wrong", "what": f"it {n}", "todo": "do", "ranks": [0]} for n in range(20)]
    text = doctor_text.text(doctor.report([healthy()], many, together=False))
    assert "it 11" in text and "it 12" not in text and text.endswith("8 more: see --json")


def test_json_round_trip_and_keys():
    fine = doctor.report([healthy()], [], together=False)
    report = doctor.report([changed("check.error", "it fails")], [], together=False)
    assert json.loads(json.dumps(report)) == report
    assert list(report) == ["format", "together", "ranks", "paths", "findings", "status"]
    assert list(report["ranks"][0]) == ["rank", "machine", "check"]
    assert list(report["findings"][0]) == ["kind", "what", "todo", "ranks"]
    assert list(fine["paths"][0]) == ["device", "largest", "algorithm", "why"]
    assert (fine["format"], fine["status"], report["status"]) == (1, 0, 1)


# -- the command ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--ranks", "0"], "argument --ranks: expected a whole number of 1 or more, got '0'"),
        (["--timeout", "0"], "argument --timeout: expected a number above 0, got '0'"),
        (["--timeout", "inf"], "argument --timeout: expected a number above 0, got 'inf'"),
    ],
)
def test_bad_usage(capsys, arguments, message):
    with pytest.raises(SystemExit) as exit:
        main(["doctor", *arguments])
    assert exit.value.code == 2 and message in capsys.readouterr().err


def test_half_of_torchruns_environment(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "one")
    assert main(["doctor"]) == 2
    assert "RANK: expected a number from 0 on, got 'one'" in capsys.readouterr().err


def hang() -> None:
    """This rank comes, and then hangs."""
    doctor.try_out = lambda *_: time.sleep(60)


def move() -> None:
    """This rank runs on another host."""
    rendezvous._boot_id = lambda: "another boot"


def _run(
    pipe: Connection, environment: dict[str, str], arguments: list[str], change: Callable[[], None]
) -> None:
    os.environ.update(environment)
    change()
    out, err = io.StringIO(), io.StringIO()
    pipe.send("here")
    pipe.recv()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(["doctor", *arguments])
    pipe.send((status, out.getvalue(), err.getvalue()))


def run(
    environments: list[dict[str, str]], *arguments: str, last: Callable[[], None] | None = None
) -> list[tuple[int, str, str]]:
    """The command in a process for each environment: status and output, but of one that hangs.
    The last one is changed. Nothing is left."""
    before = shared_files()
    running = []
    for environment in environments:
        change = last if last is not None and environment is environments[-1] else dict
        here, there = CONTEXT.Pipe()
        process = CONTEXT.Process(target=_run, args=(there, environment, list(arguments), change))
        process.start()
        there.close()
        running.append((process, here))
    try:
        for _, here in running:  # they begin together, however long they took to start
            assert here.recv() == "here"
        for _, here in running:
            here.send("go")
        waiting = [here for _, here in (running[:-1] if last is hang else running)]
        for here in waiting:
            assert here.poll(60), "a rank hangs"
        return [here.recv() for here in waiting]
    finally:
        if last is hang:
            running[-1][0].kill()
        for process, here in running:
            process.join(30)
            process.kill()
            here.close()
        assert nothing_left(before)


def two_ranks() -> list[dict[str, str]]:
    """The environments of two ranks, without torchrun."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    return [{**common, "RANK": rank, "LOCAL_RANK": rank} for rank in "01"]


def test_alone():
    """Two ranks are tried, and the facts are this machine's."""
    [(status, told, _)] = run([{"FASTREDUCE_ISA": "baseline"}], "--json")
    report = json.loads(told)
    [rank] = report["ranks"]
    cores = len(os.sched_getaffinity(0))
    assert rank["check"]["error"] == "" and rank["check"]["said"] == []
    assert rank["check"]["host"] == {
        "shared_memory": True,
        "cores": cores,
        "ranks": 2,
        "limits": [],
    }
    assert rank["machine"]["cpu"]["instruction_set"] == "baseline"
    assert rank["machine"]["build"]["targets"] or not importlib.util.find_spec("fastreduce._cuda")
    slowed = any("FASTREDUCE_ISA" in each["what"] for each in report["findings"])
    assert slowed == ("avx2" in rank["machine"]["cpu"]["wide"])
    assert status == report["status"] == (1 if report["findings"] else 0)


def test_alone_with_a_process_that_dies_or_hangs(monkeypatch):
    monkeypatch.setattr(doctor, "try_out", lambda store, rank, *_: os._exit(3))
    error = doctor._try_here(2, 30.0)["error"]
    assert re.fullmatch(r"trying failed: process [01] terminated with exit code 3", error)
    monkeypatch.setattr(doctor, "try_out", lambda *_: time.sleep(60))
    assert "has not answered within 0.4 s" in doctor._try_here(2, 0.2)["error"]
    monkeypatch.setattr(doctor.tempfile, "tempdir", "/nowhere")
    assert "/nowhere" in doctor._try_here(2, 0.2)["error"]


def test_ranks_on_two_hosts():
    (_, text, _), other = run(two_ranks(), last=move)
    assert other == (0, "", "")  # torchrun ends all when one has an error
    assert not re.search("^(SLOW|WRONG) .*process group", text, re.M)  # there is no other way
    assert len(re.findall(r"^[01] .* process group, sums right +-$", text, re.M)) == 2
    reason = "rank 1 runs on another host than rank 0"
    assert re.search(rf"^CPU tensors  all sizes +process_group +{reason}$", text, re.M)


def test_a_rank_that_does_not_come_is_named():
    [(status, text, _)] = run(two_ranks()[:1], "--timeout", "0.5")
    assert status == 1 and "WRONG  rank 1 did not come within 0.5 s" in text
    assert re.search(r"^0 .*not tried +not tried$", text, re.M)


def test_without_rank_0_the_others_say_so():
    [(status, text, error)] = run(two_ranks()[1:], "--timeout", "0.5")
    assert (status, text) == (1, "")
    assert re.search(r"rank 1: there is no store at 127.0.0.1:\d+, where rank 0 should", error)


def test_a_rank_that_hangs_is_named():
    [(status, text, _)] = run(two_ranks(), "--timeout", "2", last=hang)
    assert status == 1
    assert "WRONG  rank 1 came, but did not end its part within 2 s" in text
    assert "trying failed: " in text


def test_under_torchrun():
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", "-m", "fastreduce", "doctor"),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.stdout.count("fastreduce   0.") == 1
    for rank in range(2):
        assert re.search(rf"^{rank} .*shared memory, sums right +-$", done.stdout, re.M)
    good = "All right." in done.stdout
    assert done.returncode == (0 if good else 1)
    assert good or "do: " in done.stdout
