"""torchrun --standalone --nproc-per-node 2 examples/train_digits_accelerate.py

Accelerate, with two accumulated batches for a step, whose gradients fastreduce averages. Prints how
many steps it did: one for each that Accelerate's loop calls synchronised.
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import fastreduce

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--save", metavar="FOLDER", help="a checkpoint at the end")
options = parser.parse_args()

set_seed(0)
pixels, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
train, test = random_split(TensorDataset(pixels.float() / 16, labels), [1437, 360])
loader = DataLoader(train, batch_size=24, shuffle=True)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

# Of DDP's arguments; comm_hook is not one for this: it takes only torch's own hooks.
kwargs = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
accelerator = Accelerator(
    cpu=not torch.cuda.is_available(),  # without this it would let every CPU rank train alone
    kwargs_handlers=[kwargs],
    gradient_accumulation_steps=2,
)
ddp, prepared, loader = accelerator.prepare(model, optimizer, loader)
state = fastreduce.attach(ddp, record=True)
state.check(optimizer)  # the optimizer itself, not what prepare() has made of it
accelerator.register_for_checkpointing(state)  # save_state() saves it, too

synchronised = 0
for _ in range(options.epochs):
    for images, digits in loader:
        with accelerator.accumulate(ddp):
            accelerator.backward(nn.functional.cross_entropy(ddp(images), digits))
            prepared.step()
            prepared.zero_grad()
        synchronised += accelerator.sync_gradients
if options.save is not None:
    accelerator.save_state(options.save)

if accelerator.is_main_process:
    images, digits = (part.to(accelerator.device) for part in test[:])
    accuracy = (model(images).argmax(1) == digits).float().mean()
    averaged = len(state.stats())
    print(f"test accuracy {accuracy:.2%}, averaged {averaged} of {synchronised} steps")
state.close()
accelerator.end_training()
