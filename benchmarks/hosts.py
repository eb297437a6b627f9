"""A DDP training step between hosts: its time, and the bytes that leave a host, by averaging.

    python -m benchmarks.hosts                      # 2 hosts, at 100 Mbit/s and at 1 Gbit/s
    python -m benchmarks.hosts --rates 100mbit --variants fastreduce torch-fp16 --steps 3

The hosts are network namespaces of this machine, whose cores they share, with a limited cable each
(network.py), one rank on each, gloo between them. Copies of a model train side by side in the same
ranks and take turns, one step each per round, in an order that changes from round to round: without
communication, with DDP's own all-reduce over gloo, with torch's hooks, with fastreduce in every
wire format.

A step's time is that of the slowest rank, the figure the median over the rounds; the first rounds,
in which DDP rebuilds its buckets, do not count. "of gloo" is the median of the ratios, round by
round. "payload" is what a host sends in a step without the headers of Ethernet, IP and TCP, "wire"
with them, in bytes per element of the gradients, of the host that sends most, median over the
rounds. "nominal" is what the format makes of it, where ranks scatter and gather encoded chunks:
2 (N - 1) / N elements for every one of the gradients.

"bound" is the time of the step without communication, and of its payload at the rate that plain
sockets reach in the same run: every host sends to the next, all at once. (What is averaged during
the backward pass can be faster than that.) Whether all ranks end with the same bits of all
parameters is compared, too.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import json
import os
import random
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fastreduce
from benchmarks import hooks, network
from benchmarks.hooks import BASE, OURS, Attach
from benchmarks.models import WORKLOADS, Workload
from benchmarks.ranks import wait_for
from benchmarks.results import headline, machine

# What a step should take at most of gloo's, in float32, between 2 hosts at 100 Mbit/s; and what a
# payload of ours may differ from the nominal one.
TARGETS = {f"{OURS}-int8": 0.35, f"{OURS}-int4": 0.22}
TARGET_SETTING = (2, "100mbit")
BYTES_TARGET = 0.02

GLOO = "gloo"

# Rounds in which buckets are rebuilt, moved, and PowerSGD sends all.
WARM_UP = 4
PORT = 29500
LINK_SECONDS = 0.5  # of plain sockets, at a time

Nominal = Callable[[nn.Module], float]


def elements(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def each(nbytes: float) -> Nominal:
    """So many bytes for every element."""
    return lambda model: nbytes * elements(model)


def power_sgd_bytes(rank: int) -> Nominal:
    """Two thin matrices instead of every one that this makes smaller; the rest in float32."""

    def nominal(model: nn.Module) -> float:
        count = 0
        for parameter in model.parameters():
            rows = parameter.shape[0]
            thin = (rows + parameter.numel() // rows) * rank
            smaller = parameter.dim() > 1 and thin * 2 < parameter.numel()
            count += thin if smaller else parameter.numel()
        return 4.0 * count

    return nominal


@dataclass(frozen=True)
class Variant:
    """How gradients are averaged, and the bytes that the format makes of a model's gradients."""

    attach: Attach
    nominal: Nominal | None


VARIANTS = {
    BASE: Variant(hooks.nothing, each(0)),
    GLOO: Variant(hooks.built_in, each(4)),
    "torch-bf16": Variant(hooks.torch_bf16, each(2)),
    "torch-fp16": Variant(hooks.torch_fp16, each(2)),
    "torch-powersgd-1": Variant(hooks.power_sgd(1), power_sgd_bytes(1)),
    "torch-powersgd-2": Variant(hooks.power_sgd(2), power_sgd_bytes(2)),
    OURS: Variant(hooks.ours(wire="fp32"), each(4)),
    f"{OURS}-bf16": Variant(hooks.ours(wire="bf16"), each(2)),
    f"{OURS}-fp16": Variant(hooks.ours(wire="fp16"), each(2)),
    # With a scale of 4 bytes for every 128 elements.
    f"{OURS}-fp8_e4m3": Variant(hooks.ours(wire="fp8_e4m3"), each(1 + 4 / 128)),
    f"{OURS}-fp8_e5m2": Variant(hooks.ours(wire="fp8_e5m2"), each(1 + 4 / 128)),
    f"{OURS}-int8": Variant(hooks.ours(wire="int8"), each(1 + 4 / 128)),
    f"{OURS}-int4": Variant(hooks.ours(wire="int4"), each(1 / 2 + 4 / 128)),
    f"{OURS}-onebit": Variant(hooks.ours(wire="onebit"), each(1 / 8 + 4 / 128)),
    f"{OURS}-topk": Variant(hooks.ours(wire=fastreduce.Wire("topk", k=0.01)), None),
    f"{OURS}-lowrank": Variant(hooks.ours(wire=fastreduce.Wire("lowrank", rank=2)), None),
}
ALWAYS = [BASE, GLOO]  # what the others are compared with


# -- a rank -----------------------------------------------------------------------------------


class Training:
    """A model, its optimizer, a batch of this rank's own, and how the gradients are averaged."""

    def __init__(
        self, variant: Variant, workload: Workload, batch: int, bucket_cap_mb: float
    ) -> None:
        torch.manual_seed(0)
        # The same on all ranks as it is: not sent once more.
        self.model = DistributedDataParallel(
            workload.build(), bucket_cap_mb=bucket_cap_mb, init_sync=False
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, foreach=True)
        torch.manual_seed(1 + dist.get_rank())
        self.x, self.y = workload.data(batch)
        self.state = variant.attach(self.model)

    def step(self) -> tuple[float, network.Traffic]:
        """Lets the ranks meet and takes a step: its seconds here, and what this host sent."""
        before = network.traffic()
        dist.barrier()
        begin = time.perf_counter()
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(self.x), self.y).backward()
        self.optimizer.step()
        seconds = time.perf_counter() - begin
        dist.barrier()  # what was sent has arrived
        return seconds, network.traffic() - before

    def digest(self) -> str:
        """The same for the same bits of all parameters."""
        found = hashlib.sha256()
        for parameter in self.model.parameters():
            found.update(parameter.detach().numpy().tobytes())
        return found.hexdigest()

    def close(self) -> None:
        if self.state is not None:
            self.state.close()


def link_rate(address: str, next_rank: int, nbytes: int) -> float:
    """Bytes per second of plain sockets: from every rank to one on the next host, all at once."""
    with socket.create_server((address, 0)) as listener:
        listeners: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(listeners, listener.getsockname())
        to_next = socket.create_connection(tuple(listeners[next_rank]))
        from_last, _ = listener.accept()
    rates = []
    with to_next, from_last:
        for _ in range(3):
            dist.barrier()
            begin = time.perf_counter()
            sender = threading.Thread(target=to_next.sendall, args=(bytes(nbytes),))
            sender.start()
            left = nbytes
            while left and (got := len(from_last.recv(min(left, 1 << 20)))):
                left -= got
            sender.join()
            rates.append((nbytes - left) / (time.perf_counter() - begin))
    return statistics.median(rates)


def rank_main(setting: dict[str, Any]) -> dict[str, Any]:
    """One rank's run; its own figures of every round."""
    rank, world_size = setting["rank"], setting["world_size"]
    addresses, ranks_per_host = setting["addresses"], setting["ranks_per_host"]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{addresses[0]}:{PORT}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=300),
    )
    share = network.bits_per_second(setting["rate"]) / 8 / ranks_per_host
    rate = link_rate(
        addresses[rank // ranks_per_host],
        (rank + ranks_per_host) % world_size,
        int(share * LINK_SECONDS),
    )
    workload = WORKLOADS[setting["model"]]
    trainings = {
        name: Training(VARIANTS[name], workload, setting["batch"], setting["bucket_cap_mb"])
        for name in setting["variants"]
    }
    rounds: dict[str, list[tuple[float, int, int]]] = {name: [] for name in trainings}
    order = list(trainings)
    shuffle = random.Random(0).shuffle  # the same on all ranks
    for _ in range(WARM_UP + setting["steps"]):
        shuffle(order)
        for name in order:
            seconds, sent = trainings[name].step()
            rounds[name].append((seconds, sent.payload_bytes, sent.wire_bytes))
    digests = {name: training.digest() for name, training in trainings.items()}
    for training in trainings.values():
        training.close()
    # What is left of models holds the group, whose threads must end before the interpreter.
    trainings.clear()
    del training
    gc.collect()
    dist.destroy_process_group()
    return {
        "link_rate": rate,
        "rounds": {name: own[WARM_UP:] for name, own in rounds.items()},
        "digests": digests,
    }


# -- all of them ------------------------------------------------------------------------------


def start_ranks(
    hosts: network.Network, rate: str, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """What every rank returns."""
    world_size = arguments.hosts * arguments.ranks_per_host
    setting = vars(arguments) | {
        "addresses": hosts.addresses,
        "rate": rate,
        "world_size": world_size,
    }
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # of addresses without a host name
    environment = quiet | dict(os.environ) | {"GLOO_SOCKET_IFNAME": network.INTERFACE}
    command = [sys.executable, "-m", "benchmarks.hosts", "--worker"]
    with contextlib.ExitStack() as stack:
        # Without names: nothing is left behind.
        files = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(world_size)]
        processes = [
            hosts.start(
                rank // arguments.ranks_per_host,
                [*command, json.dumps(setting | {"rank": rank, "file": file.fileno()})],
                env=environment,
                pass_fds=[file.fileno()],
            )
            for rank, file in enumerate(files)
        ]
        wait_for(processes)
        for file in files:
            file.seek(0)
        return [json.load(file) for file in files]


def measure(rate: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures of one rate."""
    with network.Network(arguments.hosts, rate) as hosts:
        ranks = start_ranks(hosts, rate, arguments)
    model = WORKLOADS[arguments.model].build()
    count = elements(model)
    times: dict[str, list[float]] = {}
    sent: dict[str, dict[str, float]] = {"payload": {}, "wire": {}}
    for name in arguments.variants:
        own = [rank["rounds"][name] for rank in ranks]
        times[name] = [max(s for s, _, _ in together) for together in zip(*own, strict=True)]
        # Ranks of a host count the same.
        for kind, column in (("payload", 1), ("wire", 2)):
            sent[kind][name] = max(
                statistics.median(step[column] for step in rounds) / count for rounds in own
            )
    hops = 2 * (arguments.hosts - 1) / arguments.hosts
    nominal = {name: VARIANTS[name].nominal for name in arguments.variants}
    return {
        "rate": rate,
        "hosts": arguments.hosts,
        "ranks_per_host": arguments.ranks_per_host,
        "congestion_control": network.congestion(),
        "mtu": network.MTU,
        "link_bytes_per_second": arguments.ranks_per_host * min(r["link_rate"] for r in ranks),
        "model": arguments.model,
        "elements": count,
        "batch": arguments.batch,
        "bucket_cap_mb": arguments.bucket_cap_mb,
        "steps": arguments.steps,
        "seconds": {name: statistics.median(own) for name, own in times.items()},
        "of_gloo": {
            name: statistics.median(t / g for t, g in zip(own, times[GLOO], strict=True))
            for name, own in times.items()
        },
        "payload_bytes_per_element": sent["payload"],
        "wire_bytes_per_element": sent["wire"],
        "nominal_bytes_per_element": {
            name: None if own is None or arguments.ranks_per_host > 1 else hops * own(model) / count
            for name, own in nominal.items()
        },
        "same_bits": {
            name: len({rank["digests"][name] for rank in ranks}) == 1 for name in arguments.variants
        },
    }


def table(result: dict[str, Any]) -> str:
    """What is printed of a result."""
    link, count = result["link_bytes_per_second"], result["elements"]
    lines = [
        f"\n{result['hosts']} hosts at {result['rate']} (plain sockets: {link * 8 / 1e6:.1f} Mbit/s"
        f" each way, {result['congestion_control']}), {result['ranks_per_host']} ranks per host, "
        f"{result['model']} of {count / 1e6:.2f} M elements, batch {result['batch']}, "
        f"buckets {result['bucket_cap_mb']:g} MB, {result['steps']} rounds",
        f"{'':<20} {'step ms':>9} {'bound ms':>9} {'of gloo':>8} "
        f"{'payload':>9} {'wire':>9} {'nominal':>9} {'same bits':>9}",
    ]
    for name, seconds in result["seconds"].items():
        payload = result["payload_bytes_per_element"][name]
        nominal = result["nominal_bytes_per_element"][name]
        bound = result["seconds"][BASE] + payload * count / link
        line = (
            f"{name:<20} {seconds * 1e3:9.1f} {bound * 1e3:9.1f} {result['of_gloo'][name]:8.3f} "
            f"{payload:9.5f} {result['wire_bytes_per_element'][name]:9.5f} "
            f"{'-' if nominal is None else f'{nominal:.5f}':>9} "
            f"{'yes' if result['same_bits'][name] else 'no':>9}"
        )
        if name in TARGETS and (result["hosts"], result["rate"]) == TARGET_SETTING:
            line += f"  of gloo: target <= {TARGETS[name]}"
        if nominal:
            line += f"  payload {payload / nominal - 1:+.2%}"
            if name.startswith(OURS):
                line += f" (target +-{BYTES_TARGET:.0%})"
        lines.append(line)
    return "\n".join(lines)


def known_rate(text: str) -> str:
    network.bits_per_second(text)
    return text


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument(
        "--rates", type=known_rate, nargs="+", default=["100mbit", "1gbit"], help="of a cable"
    )
    parser.add_argument("--model", choices=WORKLOADS, default="mlp")
    parser.add_argument("--batch", type=int, default=2, help="per rank; small: the network counts")
    parser.add_argument("--bucket-cap-mb", type=float, default=25.0)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--steps", type=int, default=10, help="of each variant")
    parser.add_argument("--json", "--out", help="write the results there")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    arguments.variants = list(dict.fromkeys([*ALWAYS, *arguments.variants]))
    return arguments


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    arguments = parse(argv)
    if arguments.worker:
        setting = json.loads(arguments.worker)
        found = rank_main(setting)
        with open(setting["file"], "w") as file:
            json.dump(found, file)
        return []
    about = machine()
    print(headline(about), flush=True)
    results = []
    for rate in arguments.rates:
        try:
            results.append(measure(rate, arguments))
        except network.NetworkError as error:
            raise SystemExit(f"no hosts on this machine: {error}") from None
        print(table(results[-1]), flush=True)
    if arguments.json:
        with open(arguments.json, "w") as file:
            file.write(json.dumps({"machine": about, "results": results}, indent=1) + "\n")
    return results


if __name__ == "__main__":
    network.become_root("benchmarks.hosts")
    main()
