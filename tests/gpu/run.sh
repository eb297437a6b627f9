#!/usr/bin/env bash
# All checks and timings that need one GPU, in well under 10 minutes and without a network: builds the
# extension for that GPU, runs the tests marked cuda, the sanitizers, and the benchmarks. Needs a CUDA
# build of torch, numpy, nvcc, pytest, pybind11, ninja, setuptools. What it prints and writes goes to $OUT, or
# to build/gpu.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${OUT:-build/gpu}
mkdir -p "$out"
python=${PYTHON:-python3}
capability=$("$python" -c 'import torch; print("%d%d" % torch.cuda.get_device_capability())')

FASTREDUCE_CUDA=1 FASTREDUCE_CUDA_ARCHS=$capability "$python" setup.py -q build_ext --inplace \
    2>&1 | tail -3
nvidia-smi --query-gpu=name,driver_version,clocks.max.sm,clocks.max.mem --format=csv | tee "$out/gpu.txt"
export TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 NCCL_MULTI_RANK_GPU_ENABLE=1

status=0
"$python" -m pytest -q -m cuda tests/gpu -o addopts= -p no:cacheprovider 2>&1 | tee "$out/tests.txt" || status=$?
if command -v compute-sanitizer >/dev/null; then
    for tool in memcheck racecheck; do
        timeout 150 compute-sanitizer --tool "$tool" --report-api-errors no --error-exitcode 1 \
            "$python" -m pytest -q -x tests/gpu/test_in_process.py tests/gpu/test_wire_on_gpus.py tests/gpu/test_norms_on_gpus.py \
            -o addopts= -p no:cacheprovider \
            -k 'test_unaligned and 2 or test_reduce_scatter and 2 or test_factors_in_memory or test_streams or ranks_in_one_kernel and 4' 2>&1 |
            tail -15 | tee "$out/$tool.txt" || status=$?
    done
else
    echo "no compute-sanitizer: memcheck and racecheck not run" | tee "$out/sanitizers.txt"
fi
# Processes that share the GPU: what a call costs, beside NCCL where it allows that.
timeout 120 "$python" -m torch.distributed.run --standalone --nproc-per-node 2 \
    -m benchmarks all_reduce --quick --out "$out/shared_gpu" 2>&1 |
    tee "$out/shared_gpu.txt" || echo "processes that share the GPU: not measured"
"$python" -m benchmarks buckets in_gpu --ranks 1 --out "$out/kernels" 2>&1 |
    tee "$out/kernels.txt" || status=$?
exit "$status"
