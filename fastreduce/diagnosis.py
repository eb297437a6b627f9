"""What the facts of ``fastreduce doctor`` mean: which way messages take, what is wrong, and what to
do about it. Facts are those of :mod:`fastreduce.machine`, as JSON has them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Literal, TypeVar

from torch.torch_version import TorchVersion

from fastreduce import memory, policy, tuning
from fastreduce.machine import Facts

# Less room for the gradients of a rank is told: a model of 64 M parameters in float32 has so many.
_ROOM_BYTES = 256 * policy.MIB
_OLDEST_TORCH = (2, 6)

# Something does not work, or it does, in a slower way.
Kind = Literal["wrong", "slow"]
T = TypeVar("T", policy.Topology, policy.GpuTopology)

# Words of what is found here, or of a reason that rendezvous.py, memory.py, cuda.py, csrc/ or CUDA
# gives, and what to do about it. The first that occurs counts.
REMEDIES = {
    "runs in another network namespace": "Give the ranks of a host one network namespace: one "
    "container or pod for all, or docker run --network host.",
    "belongs to another user": "Start all ranks as one user.",
    "memfd_create": "Allow memory without a name: sysctl vm.memfd_noexec=1, seccomp's filter.",
    "bytes of shared memory": "Raise the container's memory limit, or end what fills it.",
    "could not open a socket": "Allow Unix sockets (seccomp), or raise ulimit -n.",
    "ranks, more than": "Use smaller groups: one per host, say.",
    "too little room": "Enlarge /dev/shm: docker run --shm-size, in Kubernetes an emptyDir with "
    "medium: Memory, or mount -o remount,size=...; it should hold the gradients of all ranks.",
    "CUDA does not work": "Look at nvidia-smi: the driver must be as new as the CUDA version; in a "
    "container, start it with --gpus all.",
    "was built without CUDA": "Install fastreduce again where nvcc is on PATH or in "
    "CUDA_HOME, with FASTREDUCE_CUDA=1.",
    "no kernel image": "Install fastreduce again on this machine, with FASTREDUCE_CUDA_ARCHS set "
    "to the GPU's compute capability.",
    "peer access between these GPUs is broken": "Switch off the IOMMU, or PCIe's ACS, on the host; "
    "until then NCCL may need NCCL_P2P_DISABLE=1.",
    "there is no symmetric memory": "Let every rank see all GPUs of its host (no "
    "CUDA_VISIBLE_DEVICES per rank) and call torch.cuda.set_device.",
    # Of what is found here.
    "is older than": "pip install -U torch",
    "they take turns": "Start at most one rank per core, or let the ranks run on more of them "
    "(taskset, numactl, a container's --cpuset-cpus).",
    "the control group gives": "Raise the limit (docker run --cpus, Kubernetes' limits.cpu), start "
    "fewer ranks, or pass threads= to the communicator.",
    "FASTREDUCE_ISA": "Unset FASTREDUCE_ISA.",
    "has no AVX2": "In a virtual machine, have the host's processor passed through (-cpu host).",
    "is a build without CUDA": "Install a CUDA build of torch: pytorch.org/get-started.",
    "has no NCCL": "Install one of PyTorch's own builds.",
    "have no peer access": "nvidia-smi topo -p2p r says why: a bridge between them, a chipset, a "
    "virtual machine.",
    "may not run on any core": "Bind each rank to its GPU's node: numactl --cpunodebind, or "
    "torchrun --numa-binding=node.",
    "use one GPU": "Start one rank for each GPU, and call torch.cuda.set_device(LOCAL_RANK).",
    "instruction set differs": "The slowest counts.",
    "differs between ranks": "Install the same everywhere.",
}
_REPORT = "Please report this, with the whole output."


def remedy(reason: str) -> str:
    return next((todo for words, todo in REMEDIES.items() if words in reason), _REPORT)


# -- paths ----------------------------------------------------------------------------------------


# What a GPU's link lacks for the fastest algorithms.
_LACK = {
    "switch": "multicast in the NVLink switch",
    "mesh": "an NVLink switch with multicast",
    "pcie": "NVLink",
}


def topology_of(kind: type[T], facts: Facts) -> T:
    return kind(**{**facts, "limits": tuple(map(tuple, facts["limits"]))})


def expected_topology(gpus: Facts) -> policy.GpuTopology:
    """As one rank for each of two GPUs or more should find them."""
    devices, pairs = gpus["devices"], gpus["pairs"]
    kernels = not gpus["problem"] and not any(each["problem"] for each in devices)
    if not kernels or not all(each["access"] and each["right"] for each in pairs):
        return policy.GpuTopology("none")
    return policy.topology_of(
        pair_bandwidth=min(each["bandwidth"] for each in pairs),
        world_size=len(devices),
        multicast=all(each["multicast"] for each in devices),
        limits=tuning.recall(tuning.gpus(len(devices), devices[0]["name"])),
    )


def paths(ranks: Sequence[Facts]) -> list[Facts]:
    """What all-reduces of float32 take in the group that was tried; of GPUs that nobody has tried,
    what is to be expected."""
    check, gpus = ranks[0]["check"], ranks[0]["machine"]["gpus"]
    found: list[Facts] = []
    if check is not None and not check["error"]:
        host, why = check["host"], _because(check, "using the process group")
        found += _paths(topology_of(policy.Topology, host), check["world_size"], why)
        if check["device"] is not None:
            links, why = check["gpus"], _because(check, "CUDA tensors go through the process group")
            known = topology_of(policy.GpuTopology, links) if links else policy.GpuTopology("none")
            return found + _paths(known, check["world_size"], why)
    if len(gpus["devices"]) > 1:
        found += _paths(expected_topology(gpus), len(gpus["devices"]))
    return found


def _because(check: Facts, what: str) -> str:
    """The reason with which the log has said so, or ""."""
    lines = [line.partition(", because ") for line in check["said"]]
    return next((reason for begin, _, reason in lines if begin == what), "")


def _paths(
    topology: policy.Topology | policy.GpuTopology, world_size: int, reason: str = ""
) -> list[Facts]:
    """``reason``: for the process group, where the ranks have named one."""
    link = topology.link if isinstance(topology, policy.GpuTopology) else None
    if link == "none":
        reason = reason or "the GPUs do not reach each other's memory"
    expected = "expected to be the fastest (tune measures)"
    ideal = policy.GpuTopology("switch", multicast=True)
    found: list[Facts] = []
    begin = 16
    for name, largest in policy.crossovers(world_size, topology):
        why = reason or ("measured by tune" if topology.limits else expected)
        if link and why == expected:
            better = policy.choose_algorithm(2 * begin, world_size, ideal)
            why += f"; {better} would need {_LACK[link]}" if better != name else ""
        device = "cuda" if link else "cpu"  # where the tensors lie
        # ``largest``: of these messages, in bytes; None for all above.
        found.append({"device": device, "largest": largest, "algorithm": name, "why": why})
        begin = largest or begin
    return found


# -- findings -------------------------------------------------------------------------------------

Found = Iterator[tuple[Kind, str]]


def findings(ranks: Sequence[Facts]) -> list[Facts]:
    """What is wrong, of every kind once, with the ranks it was found on; ``wrong`` first.

    Args:
        ranks: each with its ``rank``, its ``machine``, and as ``check`` what came of trying (None
            where nothing could be tried).
    """
    found: dict[tuple[Kind, str], list[int]] = {}
    for each in ranks:
        machine, check = each["machine"], each["check"]
        here = [other for other in ranks if other["machine"]["boot"] == machine["boot"]]
        # One process may have tried with several ranks.
        count = max(len(here), check["host"]["ranks"] if check and len(ranks) == 1 else 0)
        cores = set[int]().union(*(other["machine"]["cpu"]["usable"] for other in here))
        for finding in (
            *_of_host(machine, check["threads"] if check else 1, count, len(cores)),
            *_of_gpus(machine),
            *(_of_check(machine, check) if check else ()),
        ):
            found.setdefault(finding, []).append(each["rank"])
    found |= {finding: [] for finding in _differences(ranks)}  # which name their ranks
    found |= {("wrong", f"{numbered(them)} use one GPU, {at}"): them for at, them in _shared(ranks)}
    return [
        {"kind": kind, "what": what, "todo": remedy(what), "ranks": them}
        for (kind, what), them in sorted(found.items(), key=lambda each: each[0][0] == "slow")
    ]


def _of_host(machine: Facts, threads: int, ranks: int, cores: int) -> Found:
    software, cpu, quota = machine["software"], machine["cpu"], machine["cpu"]["quota"]
    if TorchVersion(software["torch"]) < _OLDEST_TORCH:  # type: ignore[operator]
        yield "wrong", f"torch {software['torch']} is older than 2.6, which fastreduce needs"
    if ranks > cores:
        yield "slow", f"{ranks} ranks share {cores} of {cpu['online']} cores: they take turns"
    if quota is not None and quota < ranks * threads:
        yield (
            "slow",
            f"the control group gives {quota:g} cores' time to {ranks} ranks with {threads} "
            "thread(s): who has used it up is stopped, and the others wait for it",
        )
    limit = software["environment"].get("FASTREDUCE_ISA")
    best = "avx512" if "avx512bw" in cpu["wide"] else "avx2"
    if cpu["wide"] and limit in ("baseline", "avx2") and limit != best:
        yield "slow", f"FASTREDUCE_ISA={limit} keeps the kernels from using {best}"
    elif cpu["instruction_set"] == "baseline" and "x86" in software["system"]:
        yield "slow", "the processor has no AVX2, so that the kernels use SSE2"
    room = memory.movable_bytes(machine["memory"]["shm_free"] or 0, ranks)
    if room < _ROOM_BYTES:
        yield (
            "slow",
            f"/dev/shm has too little room: for gradients of {room / policy.MIB:.0f} MiB on each "
            f"of {ranks} ranks; those of a larger model are staged: copied twice more",
        )


_PAIRS: tuple[tuple[str, Kind, str], ...] = (
    ("access", "slow", "have no peer access: CUDA tensors go through the process group"),
    ("right", "wrong", "copy wrongly: peer access between these GPUs is broken"),
)


def _of_gpus(machine: Facts) -> Found:
    gpus, software = machine["gpus"], machine["software"]
    devices, problem = gpus["devices"], gpus["problem"]
    if not devices:
        hidden = software["environment"].get("CUDA_VISIBLE_DEVICES") in ("", "-1")
        if gpus["nodes"] and not hidden:
            why = f"CUDA does not work in torch; {problem}"
            if software["torch_cuda"] is None:
                why = f"torch {software['torch']} is a build without CUDA"
            yield "wrong", f"there are GPUs, but {why}"
        return
    if problem:
        yield "slow", f"CUDA tensors go through the process group: {problem}"
    for each in devices:
        if each["problem"] and each["problem"] != problem:
            yield (
                "slow",
                f"the kernels do not run on {each['name']} (compute capability "
                f"{each['capability']}; built for {', '.join(machine['build']['targets'])}): "
                f"{each['problem']}",
            )
    if software["nccl"] is None:
        yield (
            "wrong",
            f"torch {software['torch']} has no NCCL, which CUDA tensors between hosts need",
        )
    for key, kind, what in _PAIRS:
        pairs = [f"{p['owner']} to {p['reader']}" for p in gpus["pairs"] if p[key] is False]
        if pairs:
            them = ", ".join(pairs[:3]) + (" ..." if len(pairs) > 3 else "")
            yield kind, f"{len(pairs)} of {len(gpus['pairs'])} pairs of GPUs ({them}) {what}"


def _of_check(machine: Facts, check: Facts) -> Found:
    if check["error"]:
        yield "wrong", check["error"]
    # Between hosts there is no other way; the others are found above.
    known = ["runs on another host", "has too little room"]
    if problem := machine["gpus"]["problem"]:
        known.append(problem)
    for line in check["said"]:
        if not any(each in line for each in known):
            yield "slow", line
    if check["device"] is not None:
        node = machine["gpus"]["devices"][check["device"]]["node"]
        near = machine["cpu"]["nodes"].get(str(node), [])
        if near and not set(near) & set(machine["cpu"]["usable"]):
            yield (
                "slow",
                f"the process may not run on any core of NUMA node {node}, where its GPU is",
            )


_ALIKE: tuple[tuple[Kind, str, str, str], ...] = (
    ("wrong", "build", "version", "fastreduce"),
    ("wrong", "build", "host", "the build of the host's kernels"),
    ("wrong", "build", "cuda", "the build of the CUDA kernels"),
    ("wrong", "software", "torch", "torch"),
    ("wrong", "software", "nccl", "NCCL"),
    ("slow", "cpu", "instruction_set", "the instruction set"),
)


def _differences(ranks: Sequence[Facts]) -> Found:
    for kind, part, name, what in _ALIKE:
        values: dict[str, list[int]] = {}
        for each in ranks:
            values.setdefault(each["machine"][part][name] or "none", []).append(each["rank"])
        if len(values) > 1:
            said = "; ".join(f"{value} on {numbered(them)}" for value, them in values.items())
            yield kind, f"{what} differs between ranks: {said}"


def _shared(ranks: Sequence[Facts]) -> list[tuple[str, list[int]]]:
    """GPUs that several ranks use: where they are on the bus, and whose."""
    users: dict[tuple[str, str], list[int]] = {}
    for each in ranks:
        device = each["check"] and each["check"]["device"]
        if device is not None:
            address = each["machine"]["gpus"]["devices"][device]["address"]
            users.setdefault((each["machine"]["boot"], address), []).append(each["rank"])
    return [(at, them) for (_, at), them in users.items() if at and len(them) > 1]


def numbered(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0-3, 6``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {spans(ranks)}"


def spans(numbers: Sequence[int]) -> str:
    """``0-3, 6``, of numbers in ascending order."""
    runs = groupby(enumerate(numbers), key=lambda each: each[1] - each[0])
    ends = [(run[0][1], run[-1][1]) for run in (list(run) for _, run in runs)]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ends)
