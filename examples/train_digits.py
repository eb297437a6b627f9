"""torchrun --standalone --nproc-per-node 2 examples/train_digits.py"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fastreduce

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)  # every rank draws the same split and the same batches

pixels, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
images = pixels.float() / 16
train, test = torch.randperm(len(labels)).split([1437, 360])

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
ddp = DistributedDataParallel(model)
state = fastreduce.attach(ddp)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
for _ in range(20):
    for batch in train[torch.randperm(len(train))].split(96)[:-1]:  # the last one is incomplete
        part = batch.chunk(ranks)[rank]
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(images[part]), labels[part]).backward()
        optimizer.step()

if rank == 0:
    accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean()
    print(f"test accuracy {accuracy:.2%}")
state.close()
dist.destroy_process_group()
