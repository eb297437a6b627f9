"""fastreduce: all-reduce for data-parallel training in PyTorch."""

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise ImportError(
        "fastreduce needs torch 2.6 or newer, of your choice of build: pip install torch"
    ) from error

from fastreduce._C import instruction_set
from fastreduce.bucket import BucketPlan
from fastreduce.communicator import Communicator, Work
from fastreduce.ddp import HookState, all_reduce_hook, attach
from fastreduce.errors import (
    CommunicatorError,
    CommunicatorTimeoutError,
    MismatchError,
    PeerClosedError,
    PeerLostError,
)

__version__ = "0.1.0"

__all__ = [
    "BucketPlan",
    "Communicator",
    "CommunicatorError",
    "CommunicatorTimeoutError",
    "HookState",
    "MismatchError",
    "PeerClosedError",
    "PeerLostError",
    "Work",
    "all_reduce_hook",
    "attach",
    "instruction_set",
]
