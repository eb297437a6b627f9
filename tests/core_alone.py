"""Two ranks average an array through the compiled module alone, for a Python that has no torch: of
the package, only what needs none is imported, from where it is installed."""

from __future__ import annotations

import array
import importlib.util
import multiprocessing
import os
import sys
import types
from datetime import timedelta
from multiprocessing.queues import Queue

spec = importlib.util.find_spec("fastreduce")
assert spec is not None
package = types.ModuleType("fastreduce")  # without its __init__, which imports torch
package.__path__ = spec.submodule_search_locations
sys.modules["fastreduce"] = package

from fastreduce import _C, errors, policy  # noqa: E402

RANKS = 2
COUNT = 50_003
LIMIT = timedelta(seconds=30)


def connect(rank: int, queues: list[Queue]) -> _C.HostCommunicator:
    listener = _C.Listener()
    for queue in queues:
        queue.put((rank, listener.address, os.getpid()))
    found = sorted(queues[rank].get(timeout=LIMIT.total_seconds()) for _ in queues)
    cores = len(os.sched_getaffinity(0))
    patience = policy.patience(policy.Topology(True, cores, RANKS), background=False)
    return _C.HostCommunicator(
        listener,
        rank,
        [address for _, address, _ in found],
        [process for _, _, process in found],
        bytes(32),  # a token that both know
        timeout=LIMIT,
        connect_timeout=LIMIT,
        blocks=1,
        slot_bytes=policy.SLOT_BYTES,
        stage_bytes=policy.STAGE_BYTES,
        block_bytes=policy.THREADED_BYTES,
        foreground_ns=(patience.spin_ns, patience.yield_ns),
        background_ns=(patience.spin_ns, patience.yield_ns),
        first_epoch=0,
    )


def main(rank: int, queues: list[Queue]) -> None:
    core = connect(rank, queues)
    kind, dtype = errors.KINDS.index("all_reduce"), errors.DTYPES.index("float32")
    for name in ("one_shot", "two_shot", "ring"):
        plan = _C.plan(kind, dtype, errors.OPS.index("mean"), errors.ALGORITHMS.index(name), COUNT)
        numbers = array.array("f", [k % 1000 + 2 * rank for k in range(COUNT)])
        at, _ = numbers.buffer_info()
        # A scale, the ordinary weight; no root, no segment, no shares, norms or update.
        core.run(plan, at, at, COUNT, 0, 1.0, -1.0, -1, 0, 0, 0)
        assert list(numbers) == [k % 1000 + 1 for k in range(COUNT)], name
    core.close(True)


if __name__ == "__main__":
    queues: list[Queue] = [multiprocessing.Queue() for _ in range(RANKS)]
    ranks = [multiprocessing.Process(target=main, args=(r, queues)) for r in range(RANKS)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    sys.exit(any(each.exitcode for each in ranks))
