"""torchrun --standalone --nproc-per-node 2 examples/train_digits_weighted.py

Ranks that have different numbers of samples, of different weights, train what one process trains on
the whole batches: prints how far apart the two end.

Every rank's batch is padded to one size, as sequences are, and the loss ignores what is padding. Of
an epoch's last batch the last rank gets nothing else: its loss, a mean over nothing, is NaN, and
its weight 0.
"""

import argparse
import copy

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fastreduce

PADDING = -100

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--per-rank", type=int, default=64, help="samples, with padding")
options = parser.parse_args()

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)  # every rank draws the same split and the same batches

pixels, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
images = pixels.float() / 16
train, test = torch.randperm(len(labels)).split([1437, 360])

class_weights = torch.linspace(1, 3, 10)  # to miss a 9 costs three times what a 0 does
loss = nn.CrossEntropyLoss(class_weights, ignore_index=PADDING)

model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 10))
alone = copy.deepcopy(model)  # trained on whole batches, for comparison
ddp = DistributedDataParallel(model)
state = fastreduce.attach(ddp)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
optimizer_alone = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
for _ in range(options.epochs):
    for batch in train[torch.randperm(len(train))].split(ranks * options.per_rank):
        missing = ranks * options.per_rank - len(batch)
        x = nn.functional.pad(images[batch], (0, 0, 0, missing))
        y = nn.functional.pad(labels[batch], (0, missing), value=PADDING)
        own_x, own_y = x.chunk(ranks)[rank], y.chunk(ranks)[rank]

        optimizer.zero_grad()
        # What the loss divides by: the weights of its samples. 0 where there are none.
        state.weight(class_weights[own_y[own_y != PADDING]].sum().item())
        loss(ddp(own_x), own_y).backward()
        optimizer.step()

        optimizer_alone.zero_grad()
        loss(alone(x), y).backward()
        optimizer_alone.step()

if rank == 0:
    accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    apart = max((p - q).abs().max().item() for p, q in pairs)
    print(f"test accuracy {accuracy:.2%}, parameters at most {apart:.1e} from one process's")
state.close()
dist.destroy_process_group()
