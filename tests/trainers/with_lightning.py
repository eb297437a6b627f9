"""Trains with Lightning's Trainer in several ways. Argument: a folder for what is recorded."""

from __future__ import annotations

import logging
import sys
import warnings
from unittest import mock

import problem
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from train_digits_lightning import FastReduce

import fastreduce

warnings.filterwarnings("ignore")
logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = problem.make_model()

    def training_step(self, batch, index):
        x, y = batch
        return problem.loss(self.model(x), y)

    def configure_optimizers(self):
        return problem.make_optimizer(self.model)


class Recorder(pl.Callback):
    def __init__(self) -> None:
        self.record = problem.Record()

    def on_train_batch_start(self, trainer, module, batch, index):
        assert isinstance(trainer.strategy.model, DistributedDataParallel)
        self.record.batch(*batch)

    def on_before_optimizer_step(self, trainer, module, optimizer):
        assert len(self.record.batches) == trainer.accumulate_grad_batches
        self.record.step(module.model)


class OnAnyDevice(DDPStrategy):
    """Lightning registers hooks only where ``root_device`` is a GPU, and says nothing elsewhere.
    This is its own method, for which the device is one."""

    def _register_ddp_hooks(self) -> None:
        with mock.patch.object(OnAnyDevice, "root_device", torch.device("cuda")):
            super()._register_ddp_hooks()


class Check(pl.Callback):
    """What ``state.check(optimizer)`` does, where the backward pass is within the step."""

    def __init__(self, state: fastreduce.HookState) -> None:
        self.state = state

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.state.check_synchronized()


def fit(strategy: DDPStrategy, accumulate: int, *callbacks: pl.Callback) -> dict:
    module, recorder = Module(), Recorder()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        callbacks=[recorder, *callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    # Trainer gives every rank its part of the samples.
    trainer.fit(module, DataLoader(problem.make_samples(), batch_size=problem.BATCH))
    assert len(recorder.record.steps) == problem.BATCHES // accumulate
    return {
        "steps": recorder.record.steps,
        "parameters": [p.detach().clone() for p in module.parameters()],
    }


def official(kind: type[DDPStrategy], accumulate: int, *callbacks: pl.Callback) -> dict:
    """As Lightning's documentation says. The state, which is made before there is a model, finds
    it at the first bucket."""
    state = fastreduce.HookState(timeout=60)
    strategy = kind(
        process_group_backend="gloo",
        ddp_comm_state=state,
        ddp_comm_hook=fastreduce.all_reduce_hook,
    )
    if kind is OnAnyDevice:
        callbacks = (*callbacks, Check(state))
    run = fit(strategy, accumulate, *callbacks)
    run["passes"] = state._passes
    if run["passes"]:
        state.close()
    return run


def attached(accumulate: int) -> dict:
    """By the example's callback."""
    callback = FastReduce(timeout=60)
    run = fit(DDPStrategy(process_group_backend="gloo"), accumulate, callback)
    run["passes"] = callback.state._passes
    return run


runs = {}
for accumulate in (1, 2):
    runs["none", accumulate] = fit(DDPStrategy(process_group_backend="gloo"), accumulate)
    runs["skipped", accumulate] = official(DDPStrategy, accumulate)
    runs["official", accumulate] = official(OnAnyDevice, accumulate)
    runs["attached", accumulate] = attached(accumulate)
torch.save(runs, f"{sys.argv[1]}/{dist.get_rank()}.pt")
dist.destroy_process_group()
