"""The report of ``fastreduce doctor`` in one screen of text, out of what JSON has."""

from __future__ import annotations

import textwrap

from fastreduce import memory, policy
from fastreduce.diagnosis import numbered, spans, topology_of
from fastreduce.machine import Facts
from fastreduce.terminal import Colour, painted, size

_WIDTH = 100
_NAME = 13  # columns of a line's name
_MOST_FINDINGS = 12
_VERSIONS = {
    "python": "Python",
    "numpy": "NumPy",
    "torch": "torch",
    "torch_cuda": "CUDA",
    "nccl": "NCCL",
    "driver": "NVIDIA driver",
}


def text(report: Facts, colours: bool = False) -> str:
    """All of it: what there is, which way messages take, and what is wrong."""
    ranks = report["ranks"]
    together = report["together"]
    lines = _machine(ranks[0], together)
    lines += _table(ranks) if together else _tried(ranks[0]["check"])
    lines += _paths(report["paths"])
    return "\n".join([*lines, "", *_findings(report, colours)])


def _entry(name: str, *parts: str) -> list[str]:
    """Under a name; every part begins a line."""
    wrapped = [line for part in parts for line in textwrap.wrap(part, _WIDTH - _NAME) or [""]]
    return [f"{name if not i else '':<{_NAME}}{line}".rstrip() for i, line in enumerate(wrapped)]


def _limit(nbytes: int | None) -> str:
    return "no limit" if nbytes is None else size(nbytes)


def _machine(rank: Facts, together: bool) -> list[str]:
    machine = rank["machine"]
    software, build, cpu = machine["software"], machine["build"], machine["cpu"]
    ram = machine["memory"]
    variables = " ".join(f"{name}={value}" for name, value in software["environment"].items())
    where = f" (rank {rank['rank']}'s)" if together else ""
    kernels = f"kernels: host's by {build['compiler']} ({build['host']}), "
    cuda = f"CUDA's for {', '.join(build['targets'])} ({build['cuda']})"
    kernels += cuda if build["cuda"] else "none for CUDA"
    versions = [
        f"{name} {software[key]}" if software[key] else f"no {name}"
        for key, name in _VERSIONS.items()
    ]
    quota = "" if cpu["quota"] is None else f", {cpu['quota']:g} cores' time"
    caches = [
        f"L{each['level']} {size(each['nbytes'])}"
        + (f" for {spans(each['cores'])}" if len(each["cores"]) > 1 else "")
        for each in cpu["caches"]
    ]
    shm = ram["shm_total"]
    return [
        *_entry("fastreduce", f"{build['version']} in {build['folder']}", kernels),
        *_entry("host", f"{machine['host']}{where}, {software['system']}"),
        *_entry("software", ", ".join(versions)),
        *(_entry("environment", variables) if variables else ()),
        *_entry(
            "cores",
            f"{cpu['model']}: {len(cpu['usable'])} of {cpu['online']} ({spans(cpu['usable'])})"
            f"{quota}; kernels use {cpu['instruction_set']}",
            "; ".join(caches),
            "; ".join(f"NUMA node {node}: {spans(c)}" for node, c in cpu["nodes"].items()),
        ),
        *_entry(
            "memory",
            f"{size(ram['available'])} of {size(ram['total'])} available; control group: "
            f"{_limit(ram['limit'])}",
            f"of a process: {_limit(ram['locked'])} may be locked; open files: "
            f"{ram['files'] or 'no limit'}",
        ),
        *_entry("/dev/shm", f"{size(ram['shm_free'])} of {size(shm)} free" if shm else "none"),
        *_gpus(machine["gpus"], software["torch_cuda"]),
    ]


def _gpus(gpus: Facts, torch_cuda: str | None) -> list[str]:
    devices, pairs = gpus["devices"], gpus["pairs"]
    if not devices:
        reason = gpus["problem"] or "torch sees none"
        return _entry("GPUs", f"none: {reason if torch_cuda else 'torch was built without CUDA'}")
    told = {True: "multicast", False: "no multicast", None: "multicast unknown"}
    lines = []
    for index, each in enumerate(devices):
        parts = (
            f"{index}: {each['name']} ({each['capability']})",
            size(each["nbytes"]),
            each["address"],
            "" if each["node"] is None else f"node {each['node']}",
            each["link"] and f"PCIe {each['link']}",
            told[each["multicast"]],
            each["problem"] or "kernels run",
        )
        lines.append(", ".join(filter(None, parts)))
    if pairs:
        rates = [each["bandwidth"] / 1e9 for each in pairs if each["bandwidth"]]
        rate = f", the slowest at {min(rates):.0f} GB/s" if rates else ""
        lines.append(
            f"{len(pairs)} pairs: peer access for {sum(each['access'] for each in pairs)}, copies "
            f"right for {sum(each['right'] is True for each in pairs)}{rate}"
        )
    return _entry("GPUs", *lines) + [" " * _NAME + line for line in gpus["matrix"]]


def _tried(check: Facts) -> list[str]:
    parts = [f"{check['world_size']} ranks here: {_way(check)}"]
    topology = topology_of(policy.Topology, check["host"])
    if topology.shared_memory:
        polls = policy.patience(topology, background=False).spin_ns > 0
        parts += [f"threads per rank: {check['threads']}", f"waits {'poll' if polls else 'yield'}"]
    return _entry("tried", "; ".join(parts))


def _way(check: Facts) -> str:
    """Of tensors on the CPU. Sums that are not right are an error."""
    if check["error"]:
        return "failed"
    return f"{'shared memory' if check['host']['shared_memory'] else 'process group'}, sums right"


def _table(ranks: list[Facts]) -> list[str]:
    rows = [("rank", "host", "cores", "kernels", "shm/rank", "GPU", "CPU tensors", "CUDA tensors")]
    for each in ranks:
        machine, check = each["machine"], each["check"]
        device, gpus, cpu = check and check["device"], machine["gpus"]["devices"], machine["cpu"]
        cuda = "-" if device is None else "kernels" if check["gpus"] else "process group"
        here = sum(other["machine"]["boot"] == machine["boot"] for other in ranks)
        rows.append(
            (
                str(each["rank"]),
                machine["host"],
                spans(cpu["usable"]),
                cpu["instruction_set"],
                size(memory.movable_bytes(machine["memory"]["shm_free"] or 0, here)),
                f"{len(gpus)} here" if device is None else f"{device}: {gpus[device]['name']}",
                _way(check) if check else "not tried",
                cuda if check else "not tried",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["", *("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)]


def _paths(paths: list[Facts]) -> list[str]:
    lines = []
    for device in ("cpu", "cuda"):
        parts: list[str] = []
        for each in (path for path in paths if path["device"] == device):
            last = "above" if parts else "all sizes"
            reach = f"to {size(each['largest'])}" if each["largest"] else last
            parts.append(f"{reach:<12} {each['algorithm']:<14} {each['why']}")
        if parts:
            lines += _entry(f"{device.upper()} tensors", *parts)
    return ["", *lines] if lines else []


def _findings(report: Facts, colours: bool) -> list[str]:
    if not report["findings"]:
        return [painted("All right.", "green", colours)]
    lines = []
    for each in report["findings"][:_MOST_FINDINGS]:
        who = f" ({numbered(each['ranks'])})" if report["together"] and each["ranks"] else ""
        found = textwrap.wrap(f"{each['what']}{who}", _WIDTH - 7)
        colour: Colour = "red" if each["kind"] == "wrong" else "yellow"
        word = painted(f"{each['kind'].upper():<7}", colour, colours)
        lines += [word + found[0], *(" " * 7 + line for line in found[1:])]
        lines += textwrap.wrap(f"    do: {each['todo']}", _WIDTH, subsequent_indent=" " * 8)
    if (more := len(report["findings"]) - _MOST_FINDINGS) > 0:
        lines.append(f"{more} more: see --json")
    return lines
