"""What the facts of ``fastreduce doctor`` mean: which way messages take, what is wrong, and what to
do about it. Facts are those of :mod:`fastreduce.machine`, as JSON has them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fastreduce import memory, policy, tuning

# Less room for the gradients of a rank is told: a model of 64 M parameters in float32 has so many.
_ROOM_BYTES = 256 * policy.MIB
_OLDEST_TORCH = (2, 6)

Facts = dict[str, Any]


@dataclass
class Finding:
    """
    Attributes:
        kind: ``wrong`` (something does not work) or ``slow`` (it does, in a slower way).
        what: has been found.
        todo: to do about it.
        ranks: that it has been found on.
    """

    kind: Literal["wrong", "slow"]
    what: str
    todo: str
    ranks: list[int] = field(default_factory=list)


@dataclass
class Path:
    """What all-reduces of float32 take.

    Attributes:
        device: ``cpu`` or ``cuda``, where the tensors lie.
        largest: of these messages, in bytes; None for all above.
        algorithm: that runs.
        why: not a faster one.
    """

    device: str
    largest: int | None
    algorithm: str
    why: str


# Words of a reason that rendezvous.py, memory.py, cuda.py or csrc/ gives, and what to do about it.
REMEDIES = (
    (
        "runs in another network namespace",
        "Give the ranks of a host one network namespace: one container or pod for all, or docker "
        "run --network host.",
    ),
    ("belongs to another user", "Start all ranks as one user."),
    ("memfd_create", "Allow memory without a name: sysctl vm.memfd_noexec=1, seccomp's filter."),
    ("bytes of shared memory", "Raise the container's memory limit, or end what fills it."),
    ("could not open a socket", "Allow Unix sockets (seccomp), or raise ulimit -n."),
    ("ranks, more than", "Use smaller groups: one per host, say."),
    (
        "has too little room",
        "Enlarge /dev/shm: docker run --shm-size, in Kubernetes an emptyDir with medium: Memory, "
        "or mount -o remount,size=...; it should hold the gradients of all ranks of the host.",
    ),
    (
        "was built without CUDA",
        "Install fastreduce again where nvcc is on PATH or in CUDA_HOME, with FASTREDUCE_CUDA=1.",
    ),
    (
        "CUDA does not work",
        "Look at nvidia-smi: the driver must be as new as the CUDA version; in a container, start "
        "it with --gpus all.",
    ),
    (
        "no kernel image",
        "Install fastreduce again on this machine, with FASTREDUCE_CUDA_ARCHS set to the GPU's "
        "compute capability.",
    ),
    (
        "peer access between these GPUs is broken",
        "Switch off the IOMMU, or PCIe's ACS, on the host; until then NCCL may need "
        "NCCL_P2P_DISABLE=1.",
    ),
    (
        "there is no symmetric memory",
        "Let every rank see all GPUs of its host (no CUDA_VISIBLE_DEVICES per rank) and call "
        "torch.cuda.set_device.",
    ),
)
_REPORT = "Please report this, with the whole output."


def remedy(reason: str) -> str:
    """What to do about a reason that the library gives."""
    return next((todo for key, todo in REMEDIES if key in reason), _REPORT)


# -- paths ----------------------------------------------------------------------------------------


def _limits(topology: Facts) -> policy.Limits:
    return tuple((name, limit) for name, limit in topology["limits"])


def host_topology(check: Facts) -> policy.Topology:
    return policy.Topology(**{**check["host"], "limits": _limits(check["host"])})


def gpu_topology(check: Facts) -> policy.GpuTopology | None:
    """As the ranks have connected their GPUs; None if they have none in common."""
    found = check["gpus"]
    if found is None:
        return None
    return policy.GpuTopology(**{**found, "limits": _limits(found)})


def expected_topology(gpus: Facts) -> policy.GpuTopology | None:
    """As one rank for each GPU of a machine should find them; None for fewer than two GPUs."""
    devices, pairs = gpus["devices"], gpus["pairs"]
    if len(devices) < 2:
        return None
    kernels = not gpus["problem"] and not any(each["problem"] for each in devices)
    if not kernels or not all(each["access"] and each["right"] for each in pairs):
        return policy.GpuTopology("none")
    return policy.topology_of(
        pair_bandwidth=min(each["bandwidth"] for each in pairs),
        world_size=len(devices),
        multicast=all(each["multicast"] for each in devices),
        limits=tuning.recall(tuning.gpus(len(devices), devices[0]["name"])),
    )


def paths(ranks: Sequence[Facts]) -> list[Path]:
    """Of the group that was tried; of GPUs that nobody has tried, what is to be expected."""
    first = ranks[0]
    gpus = first["machine"]["gpus"]
    check = first["check"]
    found: list[Path] = []
    if check is not None and not check["error"]:
        reason = _because(check, "using the process group")
        found += _paths_of_host(host_topology(check), check["world_size"], reason)
    tried = check is not None and check["device"] is not None
    topology = gpu_topology(check) if tried else expected_topology(gpus)
    if topology is not None:
        found += _paths_of_gpus(topology, check["world_size"] if tried else len(gpus["devices"]))
    elif tried:
        reason = _because(check, "CUDA tensors go through the process group")
        found.append(Path("cuda", None, "process_group", reason))
    return found


def _because(check: Facts, what: str) -> str:
    """The reason with which the log has said so."""
    lines = [line.partition(", because ") for line in check["said"]]
    return next((reason for begin, _, reason in lines if begin == what), "")


def _paths_of_host(topology: policy.Topology, world_size: int, reason: str) -> list[Path]:
    found = "measured by tune" if topology.limits else "the fastest, it is expected (tune measures)"
    why = {
        "one_shot": f"{found}: one flag, and every rank reads all slots",
        "two_shot": f"{found}: every byte is read once and written once",
        "process_group": reason,
    }
    return [
        Path("cpu", largest, name, why[name])
        for name, largest in policy.crossovers(world_size, topology)
    ]


def _paths_of_gpus(topology: policy.GpuTopology, world_size: int) -> list[Path]:
    ideal = policy.GpuTopology("switch", multicast=True)
    lack = {
        "switch": "multicast in the NVLink switch",
        "mesh": "an NVLink switch with multicast",
        "pcie": "NVLink",
        "none": "peer access",
    }[topology.link]
    found = []
    begin = 16
    for name, largest in policy.crossovers(world_size, topology):
        why = "measured by tune" if topology.limits else "the fastest on paper (tune measures)"
        if topology.link == "none":
            why = "the GPUs do not reach each other's memory"
        better = policy.choose_algorithm(2 * begin, world_size, ideal)
        if better != name and not topology.limits:
            why += f"; {better} would need {lack}"
        found.append(Path("cuda", largest, name, why))
        begin = largest or begin
    return found


# -- findings -------------------------------------------------------------------------------------


def findings(ranks: Sequence[Facts]) -> list[Finding]:
    """What is wrong, of every kind once, with the ranks it was found on; ``wrong`` first.

    Args:
        ranks: each with its ``rank``, its ``machine``, and as ``check`` what came of trying (None
            where nothing could be tried).
    """
    found: dict[tuple[str, str], Finding] = {}
    for each in ranks:
        machine, check = each["machine"], each["check"]
        here = [other for other in ranks if other["machine"]["boot"] == machine["boot"]]
        # One process may have tried with several ranks.
        count = max(len(here), check["host"]["ranks"] if check and len(ranks) == 1 else 0)
        cores = set[int]().union(*(other["machine"]["cpu"]["usable"] for other in here))
        for finding in (
            *_of_software(machine),
            *_of_cores(machine, check["threads"] if check else 1, count, len(cores)),
            *_of_memory(machine, count),
            *_of_gpus(machine),
            *_of_check(machine, check),
        ):
            found.setdefault((finding.kind, finding.what), finding).ranks.append(each["rank"])
    every = [*found.values(), *_differences(ranks), *_shared_gpus(ranks)]
    return sorted(every, key=lambda finding: finding.kind == "slow")


def _of_software(machine: Facts) -> Iterator[Finding]:
    version = machine["software"]["torch"]
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers < _OLDEST_TORCH:
        yield Finding(
            "wrong",
            f"torch {version} is older than 2.6, which fastreduce needs",
            "pip install -U torch",
        )


def _of_cores(machine: Facts, threads: int, ranks: int, cores: int) -> Iterator[Finding]:
    cpu = machine["cpu"]
    quota = cpu["quota"]
    if ranks > cores:
        yield Finding(
            "slow",
            f"{ranks} ranks share {cores} of {cpu['online']} cores: they take turns",
            "Start at most one rank per core, or let the ranks run on more of them (taskset, "
            "numactl, a container's --cpuset-cpus).",
        )
    if quota is not None and quota < ranks * threads:
        yield Finding(
            "slow",
            f"the control group gives {quota:g} cores' time to {ranks} ranks with {threads} "
            "thread(s): who has used it up is stopped, and the others wait for it",
            "Raise the limit (docker run --cpus, Kubernetes' limits.cpu)"
            + (
                ", or start fewer ranks."
                if quota < ranks
                else f", or threads={int(quota / ranks)}."
            ),
        )
    limit = machine["software"]["environment"].get("FASTREDUCE_ISA")
    best = "avx512" if "avx512bw" in cpu["wide"] else "avx2" if "avx2" in cpu["wide"] else None
    if best is not None and limit in ("baseline", "avx2") and limit != best:
        yield Finding(
            "slow",
            f"FASTREDUCE_ISA={limit} keeps the kernels from using {best}",
            "Unset FASTREDUCE_ISA.",
        )
    elif cpu["instruction_set"] == "baseline" and "x86" in machine["software"]["system"]:
        yield Finding(
            "slow",
            "the processor has no AVX2, so that the kernels use SSE2",
            "In a virtual machine, have the host's processor passed through (-cpu host).",
        )


def _of_memory(machine: Facts, ranks: int) -> Iterator[Finding]:
    room = memory.movable_bytes(machine["memory"]["shm_free"] or 0, ranks)
    if room < _ROOM_BYTES:
        yield Finding(
            "slow",
            f"/dev/shm has room for gradients of {room / policy.MIB:.0f} MiB on each of {ranks} "
            "ranks; those of a larger model are staged: copied twice more",
            remedy("has too little room"),
        )


def _of_gpus(machine: Facts) -> Iterator[Finding]:
    gpus, software = machine["gpus"], machine["software"]
    devices = gpus["devices"]
    hidden = software["environment"].get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if gpus["nodes"] and not devices and not hidden:
        if software["torch_cuda"] is None:
            what = f"there are GPUs, but torch {software['torch']} was built without CUDA"
            todo = "Install a CUDA build of torch: pytorch.org/get-started."
        else:
            what = f"there are GPUs, but torch cannot use them: {gpus['problem']}"
            todo = remedy("CUDA does not work")
        yield Finding("wrong", what, todo)
    if not devices:
        return
    if gpus["problem"]:
        yield Finding(
            "slow",
            f"CUDA tensors go through the process group: {gpus['problem']}",
            remedy(gpus["problem"]),
        )
    for each in devices:
        if each["problem"] and each["problem"] != gpus["problem"]:
            yield Finding(
                "slow",
                f"the kernels do not run on {each['name']} (compute capability "
                f"{each['capability']}; built for {', '.join(machine['build']['targets'])}): "
                f"{each['problem']}",
                remedy(each["problem"]),
            )
    if software["nccl"] is None:
        yield Finding(
            "wrong",
            f"torch {software['torch']} has no NCCL, which CUDA tensors between hosts need",
            "Install one of PyTorch's own builds.",
        )
    without = [each for each in gpus["pairs"] if not each["access"]]
    if without:
        yield Finding(
            "slow",
            f"{len(without)} of {len(gpus['pairs'])} pairs of GPUs have no peer access "
            f"({_named(without)}): CUDA tensors go through the process group",
            "nvidia-smi topo -p2p r says why: a bridge between them, a chipset, a virtual machine.",
        )
    wrong = [each for each in gpus["pairs"] if each["right"] is False]
    if wrong:
        yield Finding(
            "wrong",
            f"what is copied between GPUs does not arrive as it was ({_named(wrong)})",
            remedy("peer access between these GPUs is broken"),
        )


def _named(pairs: list[Facts]) -> str:
    names = [f"{each['owner']} to {each['reader']}" for each in pairs]
    return ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")


def _of_check(machine: Facts, check: Facts | None) -> Iterator[Finding]:
    if check is None:
        return
    if check["error"]:
        yield Finding("wrong", check["error"], remedy(check["error"]))
    # Between hosts there is no other way; the others are found above.
    known = ["runs on another host", "has too little room"]
    if problem := machine["gpus"]["problem"]:
        known.append(problem)
    for line in check["said"]:
        if not any(each in line for each in known):
            yield Finding("slow", line, remedy(line))
    if check["device"] is not None:
        node = machine["gpus"]["devices"][check["device"]]["node"]
        near = machine["cpu"]["nodes"].get(str(node), [])
        if near and not set(near) & set(machine["cpu"]["usable"]):
            yield Finding(
                "slow",
                f"the process may not run on any core of NUMA node {node}, where its GPU is",
                "Bind each rank to its GPU's node: numactl --cpunodebind, or torchrun "
                "--numa-binding=node.",
            )


_ALIKE: tuple[tuple[Literal["wrong", "slow"], tuple[str, str], str], ...] = (
    ("wrong", ("build", "version"), "fastreduce"),
    ("wrong", ("build", "host"), "the build of the host's kernels"),
    ("wrong", ("build", "cuda"), "the build of the CUDA kernels"),
    ("wrong", ("software", "torch"), "torch"),
    ("wrong", ("software", "nccl"), "NCCL"),
    ("slow", ("cpu", "instruction_set"), "the instruction set"),
)


def _differences(ranks: Sequence[Facts]) -> Iterator[Finding]:
    for kind, (part, name), what in _ALIKE:
        values: dict[str, list[int]] = {}
        for each in ranks:
            value = each["machine"][part][name]
            values.setdefault("none" if value is None else value, []).append(each["rank"])
        if len(values) > 1:
            said = "; ".join(f"{value} on {numbered(them)}" for value, them in values.items())
            todo = "Install the same everywhere." if kind == "wrong" else "The slowest counts."
            yield Finding(kind, f"{what} differs between ranks: {said}", todo)


def _shared_gpus(ranks: Sequence[Facts]) -> Iterator[Finding]:
    users: dict[tuple[str, str], list[int]] = {}
    for each in ranks:
        device = each["check"] and each["check"]["device"]
        if device is not None:
            address = each["machine"]["gpus"]["devices"][device]["address"]
            users.setdefault((each["machine"]["boot"], address), []).append(each["rank"])
    for (_, address), them in users.items():
        if address and len(them) > 1:
            yield Finding(
                "wrong",
                f"{numbered(them)} use one GPU, {address}",
                "Start one rank for each GPU, and call torch.cuda.set_device(LOCAL_RANK).",
                them,
            )


def numbered(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0-3, 6``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {spans(ranks)}"


def spans(numbers: Sequence[int]) -> str:
    """``0-3, 6``, of numbers in ascending order."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in found)
