"""torchrun --standalone --nproc-per-node 2 examples/train_digits_server.py

The parameter server in both layouts: every rank serves a part of each parameter, or rank 0 serves
all. Prints how many bytes of AdamW's state each rank keeps, and that the parameters end with the
same bits.
"""

import argparse
from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.utils import parameters_to_vector

import fastreduce

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
options = parser.parse_args()

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()

pixels, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
images = pixels.float() / 16


def train_with(servers: Literal["sharded"] | Sequence[int]) -> torch.Tensor:
    """Returns the parameters."""
    torch.manual_seed(0)  # every rank draws the same split and the same batches
    train, test = torch.randperm(len(labels)).split([1437, 360])
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    server = fastreduce.ParameterServer(
        model.parameters(), torch.optim.AdamW, lr=3e-3, servers=servers
    )
    for _ in range(options.epochs):
        for batch in train[torch.randperm(len(train))].split(96)[:-1]:  # the last is incomplete
            part = batch.chunk(ranks)[rank]
            server.zero_grad()
            nn.functional.cross_entropy(model(images[part]), labels[part]).backward()
            server.step()

    kept: list[int] = [0] * ranks
    pieces = server.shard_state_dict()["pieces"]
    own = sum(each.nbytes for piece in pieces for each in piece["state"].values())
    dist.all_gather_object(kept, own)
    server.close()
    if rank == 0:
        accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean()
        print(f"servers={servers}: test accuracy {accuracy:.2%}, bytes of state by rank: {kept}")
    return parameters_to_vector(model.parameters()).detach()


sharded, textbook = train_with("sharded"), train_with([0])
if rank == 0:
    print(f"the same bits: {torch.equal(sharded, textbook)}")
dist.destroy_process_group()
