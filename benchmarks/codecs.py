"""How fast one core of the host encodes and decodes gradients in every wire format.

    python -m benchmarks.codecs

Throughput counts the bytes of the float32 gradient, and stands beside torch's copy of the same
buffer on one thread, which takes its turn in the same rounds (1.00 is as fast as a copy; what is
narrower than float32 can be faster). "encode" and "decode" handle a gradient alone, "with feedback"
encodes gradient plus residual and writes the new one: three times the bytes of plain encoding.
"reduce" adds up two ranks' messages and encodes the mean. The figures are medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.all_reduce import machine
from fastreduce import _C, enums
from fastreduce.errors import FORMATS

# What encoding and decoding alone should reach of a copy.
TARGETS = {"bf16": 0.5, "fp16": 0.5, "int8": 0.5, "int4": 0.3}
COLUMNS = ("encode", "decode", "with feedback", "reduce")


def seconds(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def actions(format: str, stochastic: bool, count: int) -> dict[str, Callable[[], object]]:
    """By column, on buffers of their own."""
    gradient = torch.randn(count)
    residuals = [torch.zeros(count) for _ in range(4)]
    pointers = torch.tensor([each.data_ptr() for each in residuals])
    plan = _C.WirePlan(2, [(0, count, 0, enums.FORMAT[format], stochastic, 128)])
    sizes = [plan.message_bytes(chunk) for chunk in range(2)]
    messages = [torch.zeros(size, dtype=torch.uint8) for size in (*sizes, sizes[0])]

    def coding(addresses: int) -> _C.WireCoding:
        return _C.WireCoding(plan, gradient.data_ptr(), 0, 0, 1.0, addresses, 0, 0, 1, 1)

    plain, kept = coding(0), coding(pointers.data_ptr())
    alive = gradient, residuals  # as long as the actions, which know addresses only

    def encode(with_what: _C.WireCoding) -> None:
        assert alive
        for chunk in range(2):
            with_what.encode(chunk, messages[chunk].data_ptr())

    def decode() -> None:
        for chunk in range(2):
            plain.decode(chunk, messages[chunk].data_ptr())

    def reduce() -> None:  # twice: a rank reduces half of the buffer
        for _ in range(2):
            plain.reduce([messages[0].data_ptr()] * 2, messages[2].data_ptr())

    return {
        "encode": lambda: encode(plain),
        "decode": decode,
        "with feedback": lambda: encode(kept),
        "reduce": reduce,
    }


def measure(format: str, stochastic: bool, count: int, rounds: int) -> dict[str, float]:
    """Of each column the throughput over a copy's; and the copy's, in bytes/s."""
    source, target = torch.randn(count), torch.empty(count)
    todo = actions(format, stochastic, count) | {"copy": lambda: target.copy_(source)}
    times: dict[str, list[float]] = {name: [] for name in todo}
    for number in range(rounds + 1):
        for name, action in todo.items():
            taken = seconds(action)
            if number:
                times[name].append(taken)
    copy = statistics.median(times.pop("copy"))
    figures = {name: copy / statistics.median(taken) for name, taken in times.items()}
    return figures | {"copy_bytes_per_second": 4 * count / copy}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=8 << 20)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("  ".join(f"{key} {value}" for key, value in machine().items()))
    print(f"{'':24}" + "".join(f"{name:>15}" for name in COLUMNS) + f"{'copy GB/s':>11}")
    results = {}
    for stochastic in (False, True):
        for format in FORMATS:
            if stochastic and format in ("fp32", "onebit"):
                continue
            name = f"{format} stochastic" if stochastic else format
            figures = measure(format, stochastic, arguments.elements, arguments.rounds)
            results[name] = figures
            line = "".join(f"{figures[column]:15.2f}" for column in COLUMNS)
            line += f"{figures['copy_bytes_per_second'] / 1e9:11.1f}"
            if target := TARGETS.get(name):
                reached = min(figures["encode"], figures["decode"]) >= target
                line += f"  target >= {target}: {'reached' if reached else 'NOT reached'}"
            print(f"{name:24}{line}", flush=True)
    if arguments.json is not None:
        found = {"machine": machine(), "elements": arguments.elements, "results": results}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
