"""torch's own tests of DistributedDataParallel, from its wheel, with fastreduce's hook in every
model that they make, on the CPU.

The tables below name all of them: those that run, and those that do not, each with its reason.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import multiprocessing
import os
import re
import signal
import tempfile
import unittest
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import pytest
import torch
from conftest import CONTEXT, TIMEOUT, nothing_left, shared_files
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

import fastreduce

# The tables are those of this version: of another, what is missing is skipped.
KNOWN = torch.__version__.startswith("2.13.")

# Which of torch's distributed tests the tables must name: all that make a DDP model.
ABOUT_DDP = re.compile(
    r"ddp|DistributedDataParallel|data_parallel|comm_hook|hook|no_sync|join|uneven|static_graph|"
    r"unused|across_rank|bucket|localSGD_optimizer|SyncBatchNorm|sync_bn",
    re.IGNORECASE,
)

# These reduce gradients: the hook has to be called on every rank. Comments say what differs from
# what torch runs, besides the device.
RUN = [
    "test_DistributedDataParallelCPU",
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_DistributedDataParallel_with_amp_and_grad_is_view",  # autocast does nothing on the CPU
    "test_accumulate_gradients_no_sync",
    "test_accumulate_gradients_no_sync_grad_is_view",
    "test_ddp_broadcast_buffer",
    "test_ddp_broadcast_buffer_via_hook",
    "test_ddp_bucket_cap_mb_list",
    "test_ddp_buffer_hook_allreduce",
    "test_ddp_buffer_hook_allreduce_return_future",
    "test_ddp_compile_static_graph",  # its model is so small that Dynamo leaves it alone
    "test_ddp_control_flow_different_across_ranks",
    "test_ddp_control_flow_same_across_ranks",
    "test_ddp_create_graph",
    "test_ddp_forward_backward_hook",
    "test_ddp_grad_div_uneven_inputs",
    "test_ddp_hook_parity_allreduce",  # ours in place of its own: a hundred known gradients
    "test_ddp_ignore_params_arg",
    "test_ddp_init_sync_buffers_with_forward_sync_buffers_false",
    "test_ddp_join_model_equivalence",
    "test_ddp_join_respects_forward_sync_buffers_false",
    "test_ddp_logging_data_cpu",
    "test_ddp_new_tensor_in_fwd",
    "test_ddp_new_tensor_in_fwd_static_graph",
    "test_ddp_remove_autograd_hooks",
    "test_ddp_returns_tensor_with_no_grad",
    "test_ddp_shared_grad_acc_unused_params",
    "test_ddp_sink_noclone",
    "test_ddp_static_graph_nested_types",
    "test_ddp_uneven_input_join_disable",
    "test_ddp_uneven_inputs",  # ours in place of its own; no big convolutions: too slow
    "test_detect_ddp_is_actually_static",
    "test_different_graph_across_ranks",
    "test_grads_same_across_ranks_with_no_sync",
    "test_invalid_static_graph",
    "test_output_unused_in_loss_dict_module",
    "test_output_unused_in_loss_tuple_module",
    "test_skip_all_reduce_unused_parameters",
    "test_static_graph_api_cpu",
    "test_static_graph_multi_forward",
    "test_undefined_grad_parity_unused_parameters",
]

# These make models with the hook, but no bucket of theirs is ever full: that the hook is there
# must not matter.
RUN_WITHOUT_CALLS = [
    "test_ddp_device_mesh_initialization",
    "test_ddp_multiple_nested_unused_params_err_ignore_params",
    "test_ddp_multiple_nested_unused_params_error",
    "test_ddp_namedtuple",
    "test_ddp_sync_module_states",
    "test_ddp_uneven_input_exception",
    "test_ddp_unused_params_rebuild_buckets_exception",
    "test_ddp_zero_output_features",
    "test_stateless_api_with_ddp",  # gradients of tensors that are not the model's
]

NOT_RUN = {
    "tests hooks of its own": [
        "test_accumulate_gradients_no_sync_allreduce_hook",
        "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
        "test_ddp_comm_hook_logging",
        "test_ddp_hook_parity_allreduce_process_group",
        "test_ddp_hook_parity_post_localSGD",
        "test_ddp_hook_parity_powerSGD",
        "test_ddp_python_error_logged",
        "test_post_localSGD_optimizer_parity",
        "test_post_localSGD_optimizer_parity_grad_is_view",
        "test_post_localSGD_optimizer_parity_with_hierarchical_sgd",
        "test_post_localSGD_optimizer_parity_with_hierarchical_sgd_grad_is_view",
        "test_post_localSGD_optimizer_step_reload",
    ],
    "DDP itself registers a hook, on streams of a GPU, for an optimizer inside backward": [
        "test_ddp_apply_optim_in_backward",
        "test_ddp_apply_optim_in_backward_grad_as_bucket_view_false",
        "test_ddp_apply_optim_in_backward_ignored_params",
    ],
    "DDP itself registers a hook, with events of a GPU, for its mixed precision": [
        "test_ddp_native_mixed_precision_grad_as_bucket_view_no_set_grad_none",
        "test_ddp_native_mixed_precision_grad_as_bucket_view_set_grad_to_none",
        "test_ddp_native_mixed_precision_ignored_params",
        "test_ddp_native_mixed_precision_no_grad_as_bucket_view_no_set_grad_none",
        "test_ddp_native_mixed_precision_no_grad_as_bucket_view_set_grad_to_none",
    ],
    "SyncBatchNorm needs GPUs": [
        "test_DistributedDataParallel_SyncBatchNorm",
        "test_DistributedDataParallel_SyncBatchNorm_2D_Input",
        "test_DistributedDataParallel_SyncBatchNorm_Channels_Last",
        "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_Running_Value",
        "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_gradient",
        "test_DistributedDataParallel_SyncBatchNorm_No_Affine",
        "test_DistributedDataParallel_SyncBatchNorm_Single_Input_Per_Process",
        "test_DistributedDataParallel_SyncBatchNorm_half",
        "test_SyncBatchNorm_process_group",
        "test_ddp_inference",
        "test_ddp_uneven_inputs_stop_iteration_sync_bn",
        "test_sync_bn_logged",
    ],
    "tests on which GPU inputs and models are": [
        "test_ddp_device",
        "test_ddp_logging_data_gpu",
    ],
    "counts the process group's own all-reduces in a profile": [
        "test_ddp_profiling_torch_profiler",
    ],
    "reduces nothing: tests DDP's constructor and its tables of parameters": [
        "test_DistributedDataParallel_requires_grad",
        "test_compute_bucket_assignment_by_size_sparse_error_without_logger",
        "test_ddp_model_diff_num_params_across_ranks",
        "test_ddp_broadcast_buffers_deprecation_warning",
        "test_ddp_build_debug_param_to_name_mapping",
        "test_ddp_build_debug_param_to_name_mapping_requires_grad",
        "test_dump_DDP_relevant_env_vars",
        "test_get_data_parallel_params",
        "test_verify_model_across_rank_with_logger",
        "test_verify_model_across_rank_without_logger",
    ],
    "torch itself skips it": [
        "test_DistributedDataParallel",
        "test_DistributedDataParallel_non_default_stream",
        "test_compute_bucket_assignment_by_size_sparse_error_with_logger",
        "test_ddp_has_finalized",
        "test_ddp_hook_pickling_powerSGD",
        "test_ddp_model_diff_shape_across_ranks",
        "test_ddp_profiling_autograd_profiler",
        "test_ddp_profiling_execution_trace",
        "test_ddp_sync_bn_training_vs_eval",
    ],
}


class OnCpu(TorchFunctionMode):
    """Most of the tests want GPUs only to place tensors on: here, whatever asks for a device gets
    the CPU."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            kwargs["device"] = "cpu"
        if function is torch.Tensor.to and isinstance(args[1], int | torch.device):
            args = (args[0], "cpu", *args[2:])
        return function(*args, **kwargs)


@contextlib.contextmanager
def hooked(compiles: bool) -> Iterator[tuple[list[fastreduce.HookState], list[int]]]:
    """In a rank: every DDP model is one on the CPU and gets fastreduce's hook. Gives what was
    attached and the buckets that the hook was called with.

    A test that ``compiles`` is without the mode, which would keep Dynamo from the model.
    """
    states: list[fastreduce.HookState] = []
    calls: list[int] = []
    construct, register = (
        DistributedDataParallel.__init__,
        DistributedDataParallel.register_comm_hook,
    )
    move, reduce = nn.Module.to, fastreduce.all_reduce_hook

    @functools.wraps(construct)
    def constructed(ddp, module, device_ids=None, output_device=None, **options):
        construct(ddp, module, **options)
        states.append(closing.enter_context(fastreduce.attach(ddp, timeout=TIMEOUT)))
        ddp.has_ours = True
        # This list is in every copy of the model, and nothing else uses it but DDP's reducer in
        # Python. Some of the tests save the model on their way, which a HookState refuses.
        ddp._comm_hooks.clear()

    def registered(ddp, state, hook):
        # A test's own hook is not registered: ours stays.
        if not hasattr(ddp, "has_ours"):
            register(ddp, state, hook)

    @functools.wraps(reduce)
    def counted(state, bucket):
        calls.append(bucket.index())
        return reduce(state, bucket)

    def moved(module, *args, **kwargs):
        if args and isinstance(args[0], int | torch.device):
            return module
        return move(module, *args, **kwargs)

    with (
        mock.patch.object(DistributedDataParallel, "__init__", constructed),
        mock.patch.object(DistributedDataParallel, "register_comm_hook", registered),
        mock.patch.object(fastreduce.ddp, "all_reduce_hook", counted),
        mock.patch.object(nn.Module, "to", moved),
        mock.patch.object(torch.Tensor, "cuda", lambda tensor, device=None: tensor),
        mock.patch.object(torch.cuda, "set_device", lambda device: None),
        mock.patch.object(torch.cuda, "synchronize", lambda device=None: None),
        mock.patch.object(torch.cuda, "current_device", lambda: 0),
        contextlib.nullcontext() if compiles else OnCpu(),
        contextlib.ExitStack() as closing,
    ):
        yield states, calls


def make_suite() -> Any:
    """torch's class of tests, whose ranks are forked from this process.

    Not to be imported by pytest's own process: it changes settings of torch and of hypothesis.
    """
    from torch.testing._internal import common_distributed

    with mock.patch.multiple(
        common_distributed,
        skip_if_lt_x_gpu=lambda *args, **kwargs: lambda test: test,
        skip_if_no_gpu=lambda test: test,
    ):
        from torch.testing._internal.distributed import distributed_test

    class Suite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        expects_calls = True

        def setUp(self) -> None:
            super().setUp()
            self._start_processes(multiprocessing.get_context("fork").Process)

        def run_test(self, name: str, pipe: Connection) -> None:
            test = getattr(self, name)

            def test_with_hook() -> None:
                with hooked(compiles="compile" in name) as (states, calls):
                    test()
                assert states, "no model has got the hook"
                assert bool(calls) == self.expects_calls, f"{len(calls)} calls of the hook"

            setattr(self, name, test_with_hook)
            super().run_test(name, pipe)

        def _run_uneven_inputs_test(self, case: Any, *args: Any, **kwargs: Any) -> None:
            if case.name != "large_conv_model":
                super()._run_uneven_inputs_test(case, *args, **kwargs)

    return Suite


def serve(pipe: Connection, folder: str) -> None:
    """A process that has imported torch's suite once and runs tests of it by name."""
    os.setsid()  # so that it can be ended with all its ranks
    tempfile.tempdir = folder
    os.environ.update(
        BACKEND="gloo",
        WORLD_SIZE="2",
        TEMP_DIR=folder,
        CUDA_VISIBLE_DEVICES="",
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(int(TIMEOUT) - 10),
    )
    torch.set_num_threads(1)
    suite = make_suite()
    gc.freeze()  # as for other ranks, see conftest.py
    pipe.send([name for name in dir(suite) if name.startswith("test_")])
    with contextlib.suppress(EOFError):
        while True:
            name, suite.expects_calls = pipe.recv()
            result = unittest.TestResult()
            suite(name).run(result)
            errors = [text for _, text in result.failures + result.errors]
            for rank in multiprocessing.active_children():
                rank.join(10)
                if rank.is_alive():
                    errors.append(f"{rank.name} did not end")
                    rank.kill()
            pipe.send((errors, [reason for _, reason in result.skipped]))


class Runner:
    """Runs torch's tests by name, in a process that has imported them."""

    def __init__(self, folder: str) -> None:
        self.pipe, there = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=serve, args=(there, folder))
        self.process.start()
        there.close()
        self.names = set(self.receive())

    def receive(self) -> Any:
        if not self.pipe.poll(2 * TIMEOUT):
            self.kill()
            pytest.fail("the tests' process hangs")
        return self.pipe.recv()

    def run(self, name: str, expects_calls: bool = True) -> tuple[list[str], list[str]]:
        """The errors and the reasons to skip."""
        self.pipe.send((name, expects_calls))
        return self.receive()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()

    def close(self) -> None:
        self.pipe.close()
        self.process.join(10)
        stuck = self.process.is_alive()
        self.kill()
        assert not stuck, "the tests' process did not end"


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    made = Runner(str(tmp_path_factory.mktemp("torch")))
    yield made
    made.close()


def check(runner: Runner, name: str, **options: Any) -> None:
    if name not in runner.names:
        assert not KNOWN, "no such test"
        pytest.skip(f"torch {torch.__version__} has no such test")
    before = shared_files()
    errors, reasons = runner.run(name, **options)
    assert not errors, "\n".join(errors)
    assert nothing_left(before)
    if reasons:
        assert not KNOWN, reasons
        pytest.skip(reasons[0])


@pytest.mark.parametrize("name", RUN)
def test_torch(runner, name):
    check(runner, name)


@pytest.mark.parametrize("name", RUN_WITHOUT_CALLS)
def test_torch_without_calls(runner, name):
    check(runner, name, expects_calls=False)


def test_a_test_without_the_hook_fails(runner):
    errors, _ = runner.run("test_DistributedDataParallel_requires_grad")
    assert "no model has got the hook" in errors[0]
    errors, _ = runner.run("test_ddp_namedtuple")
    assert "0 calls of the hook" in errors[0]


def test_tables_name_every_test_once(runner):
    named = RUN + RUN_WITHOUT_CALLS + [name for names in NOT_RUN.values() for name in names]
    assert len(named) == len(set(named))
    if not KNOWN:
        pytest.skip(f"the tables are not those of torch {torch.__version__}")
    assert set(named) == {name for name in runner.names if ABOUT_DDP.search(name)}
