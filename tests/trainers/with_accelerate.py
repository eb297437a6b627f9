"""Trains with Accelerate in several ways. Argument: a folder for what is recorded."""

from __future__ import annotations

import sys

import problem
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import fastreduce


def train(attach: bool, accumulate: int) -> dict:
    # Its comm_hook is one of torch's own, from an enum: another one is registered afterwards.
    options = DistributedDataParallelKwargs(bucket_cap_mb=1, gradient_as_bucket_view=True)
    accelerator = Accelerator(
        cpu=True, kwargs_handlers=[options], gradient_accumulation_steps=accumulate
    )
    inner = problem.make_model()
    loader = DataLoader(problem.make_samples(), batch_size=problem.BATCH)
    plain = problem.make_optimizer(inner)
    model, optimizer, loader = accelerator.prepare(inner, plain, loader)
    assert isinstance(model, DistributedDataParallel) and model.gradient_as_bucket_view
    record = problem.Record()
    if attach:
        state = fastreduce.attach(model, timeout=60)
        state.check(plain)  # the optimizer itself: Accelerate's wrapper has no hooks
        accelerator.register_for_checkpointing(state)
    for x, y in loader:
        record.batch(x, y)
        with accelerator.accumulate(model):
            accelerator.backward(problem.loss(model(x), y))
            if accelerator.sync_gradients:
                assert len(record.batches) == accumulate
                record.step(inner)
            optimizer.step()
            optimizer.zero_grad()
    assert len(record.steps) == problem.BATCHES // accumulate
    run = {
        "steps": record.steps,
        "parameters": [p.detach().clone() for p in inner.parameters()],
        "passes": state._passes if attach else 0,
    }
    if attach:
        folder = f"{sys.argv[1]}/saved-{accumulate}"
        accelerator.save_state(folder)
        accelerator.wait_for_everyone()
        state._passes = 0
        accelerator.load_state(folder)
        run["passes loaded"] = state._passes
        if accumulate == 1:
            state.close()  # the other one is left to the end of the process
    accelerator.free_memory()
    return run


runs = {}
for accumulate in (1, 2):
    for way in ("none", "attached"):
        runs[way, accumulate] = train(way == "attached", accumulate)
accelerator = Accelerator(cpu=True)
torch.save(runs, f"{sys.argv[1]}/{accelerator.process_index}.pt")
accelerator.end_training()
