"""Trains with accumulated, weighted micro-batches and a checkpoint after each of them, from the
newest one on. Arguments: a folder for checkpoints and results; at the start of which micro-batch
rank 1 kills itself, in the first incarnation only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

import problem
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import fastreduce

folder, kill_at = Path(sys.argv[1]), int(sys.argv[2])
incarnation = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()

model = problem.make_model()
ddp = DistributedDataParallel(model)
optimizer = problem.make_optimizer(model)
state = fastreduce.attach(ddp, timeout=60)
state.check(optimizer)


def checkpoint(done: int) -> Path:
    """This rank's, after so many micro-batches. Gradients and the state differ between ranks."""
    return folder / f"{done}-{rank}.pt"


def save(done: int) -> None:
    unfinished = folder / f"unfinished-{rank}"
    torch.save(
        {
            "model": model.state_dict(),
            "gradients": [p.grad for p in model.parameters()],
            "optimizer": optimizer.state_dict(),
            "state": state.state_dict(),
        },
        unfinished,
    )
    unfinished.replace(checkpoint(done))


def load() -> int:
    """The newest one that all ranks have."""
    numbers = [done for done in range(problem.BATCHES + 1) if checkpoint(done).exists()]
    newest = torch.tensor(max(numbers, default=0))
    dist.all_reduce(newest, dist.ReduceOp.MIN)
    done = int(newest)
    if done:
        saved = torch.load(checkpoint(done))
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        state.load_state_dict(saved["state"])
        for parameter, gradient in zip(model.parameters(), saved["gradients"], strict=True):
            parameter.grad = gradient
    return done


first = load()
(folder / f"started-{incarnation}-{rank}").write_text(str(first))
samples = problem.make_samples()
for micro in range(first, problem.BATCHES):
    if incarnation == 0 and rank == 1 and micro == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)
    count = 2 + (micro + 3 * rank) % 4  # the ranks' micro-batches differ in size
    start = (2 * micro + rank) * problem.BATCH
    x, y = (torch.stack(part) for part in zip(*samples[start : start + count], strict=True))
    state.weight(count, "sum")
    last = micro % 2 == 1
    with contextlib.nullcontext() if last else ddp.no_sync():
        torch.nn.functional.cross_entropy(ddp(x), y, reduction="sum").backward()
    if last:
        optimizer.step()
        optimizer.zero_grad()
    save(micro + 1)
torch.save([p.detach() for p in model.parameters()], folder / f"parameters-{rank}.pt")
state.close()
dist.destroy_process_group()
