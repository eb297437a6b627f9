"""fastreduce: all-reduce for data-parallel training in PyTorch."""

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise ImportError(
        "fastreduce needs torch 2.6 or newer, of your choice of build: pip install torch"
    ) from error

try:
    from fastreduce._C import instruction_set
except ImportError as error:
    raise ImportError(
        f"fastreduce has not been built in {__path__[0]} ({error}). In a checkout of the sources, "
        "that folder hides an installed fastreduce: run from elsewhere, or pip install -e ."
    ) from error
from fastreduce.bucket import BucketPlan
from fastreduce.communicator import Communicator, Work
from fastreduce.ddp import HookState, all_reduce_hook, attach
from fastreduce.errors import (
    CommunicatorError,
    CommunicatorTimeoutError,
    MismatchError,
    PeerClosedError,
    PeerLostError,
    UnsynchronizedError,
)
from fastreduce.grad_norm import GradientNorm
from fastreduce.grad_scaler import GradScaler
from fastreduce.norms import Norm, Norms
from fastreduce.parameter_server import ParameterServer
from fastreduce.server_state import merge_shards
from fastreduce.wire import Wire

__version__ = "0.1.0"

__all__ = [
    "BucketPlan",
    "Communicator",
    "CommunicatorError",
    "CommunicatorTimeoutError",
    "GradScaler",
    "GradientNorm",
    "HookState",
    "MismatchError",
    "Norm",
    "Norms",
    "ParameterServer",
    "PeerClosedError",
    "PeerLostError",
    "UnsynchronizedError",
    "Wire",
    "Work",
    "all_reduce_hook",
    "attach",
    "instruction_set",
    "merge_shards",
]
