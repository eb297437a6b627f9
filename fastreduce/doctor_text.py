"""The report of ``fastreduce doctor`` in one screen of text, out of what JSON has."""

from __future__ import annotations

import textwrap

from fastreduce import memory, policy
from fastreduce.diagnosis import Facts, host_topology, numbered, spans
from fastreduce.terminal import Colour, painted, size

_WIDTH = 100
_NAME = 13  # columns of a line's name
_MOST_FINDINGS = 12


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
    where = f" (rank {rank['rank']}'s)" if together else ""
    kernels = f"host's by {build['compiler']} ({build['host']}), "
    kernels += (
        f"CUDA's for {', '.join(build['targets'])} ({build['cuda']})"
        if build["cuda"]
        else "none for CUDA"
    )
    versions = [f"Python {software['python']}", f"NumPy {software['numpy']}"]
    versions.append(f"torch {software['torch']}")
    for key, name in (("torch_cuda", "CUDA"), ("nccl", "NCCL"), ("driver", "NVIDIA driver")):
        versions.append(f"{name} {software[key]}" if software[key] else f"no {name}")
    quota = "" if cpu["quota"] is None else f", {cpu['quota']:g} cores' time"
    return [
        *_entry("fastreduce", f"{build['version']} in {build['folder']}", f"kernels: {kernels}"),
        *_entry("host", f"{machine['host']}{where}, {software['system']}"),
        *_entry("software", ", ".join(versions)),
        *_environment(software["environment"]),
        *_entry(
            "cores",
            f"{cpu['model']}: {len(cpu['usable'])} of {cpu['online']} ({spans(cpu['usable'])})"
            f"{quota}; kernels use {cpu['instruction_set']}",
            "; ".join(map(_cache, cpu["caches"])),
            "; ".join(f"NUMA node {node}: {spans(c)}" for node, c in cpu["nodes"].items()),
        ),
        *_memory(machine["memory"]),
        *_gpus(machine["gpus"], software["torch_cuda"]),
    ]


def _environment(variables: dict[str, str]) -> list[str]:
    if not variables:
        return []
    return _entry("environment", " ".join(f"{name}={value}" for name, value in variables.items()))


def _cache(cache: Facts) -> str:
    shared = f" for {spans(cache['cores'])}" if len(cache["cores"]) > 1 else ""
    return f"L{cache['level']} {size(cache['nbytes'])}{shared}"


def _memory(found: Facts) -> list[str]:
    shm = "none"
    if found["shm_total"] is not None:
        shm = f"{size(found['shm_free'])} of {size(found['shm_total'])} free"
    files = "no limit" if found["files"] is None else found["files"]
    return [
        *_entry(
            "memory",
            f"{size(found['available'])} of {size(found['total'])} available; control group: "
            f"{_limit(found['limit'])}",
            f"of a process: {_limit(found['locked'])} may be locked; open files: {files}",
        ),
        *_entry("/dev/shm", shm),
    ]


def _gpus(gpus: Facts, torch_cuda: str | None) -> list[str]:
    devices, pairs = gpus["devices"], gpus["pairs"]
    if not devices:
        reason = gpus["problem"] or "torch sees none"
        return _entry("GPUs", f"none: {reason if torch_cuda else 'torch was built without CUDA'}")
    lines = []
    for index, each in enumerate(devices):
        parts = [f"{each['name']} ({each['capability']})", size(each["nbytes"])]
        parts += [each["address"]] if each["address"] else []
        parts += [] if each["node"] is None else [f"node {each['node']}"]
        parts += [f"PCIe {each['link']}"] if each["link"] else []
        told = {True: "multicast", False: "no multicast", None: "multicast unknown"}
        parts.append(told[each["multicast"]])
        parts.append(each["problem"] or "kernels run")
        lines.append(f"{index}: {', '.join(parts)}")
    if pairs:
        rates = [each["bandwidth"] / 1e9 for each in pairs if each["bandwidth"]]
        rate = f", the slowest at {min(rates):.0f} GB/s" if rates else ""
        lines.append(
            f"{len(pairs)} pairs: peer access for {sum(each['access'] for each in pairs)}, copies "
            f"right for {sum(each['right'] is True for each in pairs)}{rate}"
        )
    named = _entry("GPUs", *lines)
    return [*named, *(" " * _NAME + line for line in gpus["matrix"])]


def _tried(check: Facts) -> list[str]:
    parts = [f"{check['world_size']} ranks here: {_way(check)}"]
    topology = host_topology(check)
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
        device = check and check["device"]
        gpus = machine["gpus"]["devices"]
        cuda = "-" if device is None else "process group" if check["gpus"] is None else "kernels"
        room = memory.movable_bytes(
            machine["memory"]["shm_free"] or 0,
            sum(other["machine"]["boot"] == machine["boot"] for other in ranks),
        )
        rows.append(
            (
                str(each["rank"]),
                machine["host"],
                spans(machine["cpu"]["usable"]),
                machine["cpu"]["instruction_set"],
                size(room),
                f"{len(gpus)} here" if device is None else f"{device}: {gpus[device]['name']}",
                "not tried" if check is None else _way(check),
                "not tried" if check is None else cuda,
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
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
        lines += textwrap.wrap(
            each["todo"], _WIDTH, initial_indent="    do: ", subsequent_indent=" " * 8
        )
    if (more := len(report["findings"]) - _MOST_FINDINGS) > 0:
        lines.append(f"{more} more: see --json")
    return lines
