"""The protocols of csrc/ with ranks as threads of one process, under sanitizers, each beside its
negative controls: with one wait, order or parity broken, the same run has to fail. Further, what
depends on the compiler alone: warnings, and symbols that a linker could merge.
"""

from __future__ import annotations

import ast
import contextlib
import fcntl
import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# What needs neither Python's headers nor CUDA's.
SOURCES = sorted(
    path
    for path in (ROOT / "csrc").glob("*.cpp")
    if not path.stem.endswith("bindings") and path.stem != "cuda_driver"
)
KERNELS = ROOT / "csrc" / "host_kernels.cpp"
TESTS = ROOT / "tests" / "cpp"
TIMEOUT = 560

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

# What a run ends with (see protocols.cpp), or its sanitizer.
WRONG = 2
GAVE_UP = 3
REPORTED = 66
ENVIRONMENT = {
    "TSAN_OPTIONS": f"halt_on_error=1:exitcode={REPORTED}",
    "ASAN_OPTIONS": f"detect_leaks=0:exitcode={REPORTED}",
    "UBSAN_OPTIONS": f"print_stacktrace=1:exitcode={REPORTED}",
}
# (With -O1 the second takes three times as long to compile.)
SANITIZERS = {
    "thread": "-O1 -fsanitize=thread",
    "address": "-O0 -fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all",
}
CHECKED = "-std=c++17 -g1 -pthread -ffp-contract=off -DFR_BASELINE_ONLY -iquote csrc"

# Case -> what is broken, and has to be noticed. Only ThreadSanitizer sees a missing order.
SABOTAGES = {
    "one_shot": "no_enter relaxed_enter early_enter relaxed_wait same_slot same_announcement"
    " no_block_barrier",
    "two_shot": "no_enter no_barrier relaxed_enter relaxed_step relaxed_wait early_enter"
    " early_step no_block_barrier",
    "two_shot_staged": "no_enter no_barrier less_step relaxed_step relaxed_wait early_step"
    " no_block_barrier",
    "two_shot_staged_far": "no_barrier less_step",
    "ring": "no_tail no_head less_tail less_head relaxed_tail relaxed_head relaxed_wait"
    " early_tail early_head no_block_barrier",
    "encoded": "no_enter no_barrier less_step relaxed_step relaxed_wait early_step"
    " no_block_barrier",
    "reduce_scatter_one_shot": "no_enter same_slot",
    "reduce_scatter": "no_enter no_barrier",
    "reduce_scatter_staged": "no_barrier less_step",
    "reduce_scatter_v_one_shot": "no_enter same_slot",
    "reduce_scatter_v": "no_enter no_barrier",
    "reduce_scatter_v_staged": "no_barrier less_step",
    "all_gather_one_shot": "no_enter same_slot",
    "all_gather": "no_enter no_barrier",
    "all_gather_staged": "no_barrier less_step",
    "all_gather_v_one_shot": "no_enter same_slot",
    "all_gather_v": "no_enter no_barrier",
    "all_gather_v_staged": "no_barrier less_step",
    "broadcast_one_shot": "no_enter same_slot",
    "broadcast": "no_enter no_barrier",
    "broadcast_staged": "no_barrier less_step",
    "low_latency": "no_line same_inbox no_block_barrier",
    "multimem": "no_barrier relaxed_line relaxed_step no_block_barrier",
    "greeted_one_shot": "relaxed_line same_inbox same_slot no_block_barrier",
    "greeted_two_shot": "no_barrier relaxed_line no_block_barrier",
    "greeted_reduce_scatter_one_shot": "relaxed_line same_slot",
    "barrier": "no_barrier relaxed_step early_step no_block_barrier",
    "medley": "no_enter no_barrier",
}
# Those that a comparison of results notices, too.
VISIBLE = {
    "one_shot": "no_enter same_slot same_announcement",
    "two_shot": "no_barrier",
    "two_shot_staged": "no_barrier less_step",
    "ring": "no_tail no_head",
    "encoded": "no_barrier less_step",
    "all_gather_staged": "no_barrier",
    "barrier": "no_barrier",
}
# That the other sanitizers watch is controlled with faults of their own kind.
FAULTS = {
    ("low_latency", "short_segment"): "heap-buffer-overflow",
    ("one_shot", "misaligned"): "misaligned address",
}


def pairs(table: dict[str, str]) -> list[tuple[str, str]]:
    return [(case, sabotage) for case, names in table.items() for sabotage in names.split()]


def build_settings() -> tuple[str, dict[str, str]]:
    """The flags in setup.py, which cannot be imported: all, and those of each instruction set."""
    tree = ast.parse((ROOT / "setup.py").read_text())
    wanted: list[ast.stmt] = []
    for node in tree.body:
        names = [getattr(target, "id", "") for target in getattr(node, "targets", [])]
        if "FLAGS" in names or getattr(node, "name", "") == "instruction_sets":
            wanted.append(node)
    scope: dict[str, object] = {"platform": platform}
    exec(compile(ast.Module(wanted, []), "setup.py", "exec"), scope)
    flags, sets = scope["FLAGS"], scope["instruction_sets"]
    assert isinstance(flags, str) and callable(sets)
    return flags, {name: f"{extra} -DFR_ISA={name}" for name, extra in sets().items()}


FLAGS, INSTRUCTION_SETS = build_settings()


class Builder:
    """Compiles objects on all cores, behind whatever else runs; whoever asks for one waits for
    it. Builders of several processes can share a folder, and what one has compiled."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pool = ThreadPoolExecutor(os.cpu_count())
        self._objects: dict[Path, Future[Path]] = {}

    def start(self, source: Path, flags: str) -> Future[Path]:
        made_of = hashlib.sha256(f"{source} {flags}".encode()).hexdigest()
        target = self._folder / f"{source.stem}-{made_of[:16]}.o"
        if target not in self._objects:
            self._objects[target] = self._pool.submit(self._compile, source, flags, target)
        return self._objects[target]

    def strictly(self, source: Path, instruction_set: str) -> Future[Path]:
        """With warnings as errors; if setup.py has compiled it so, that one."""
        built = built_strictly(source, instruction_set)
        if built is None:
            return self.start(source, strict_flags(instruction_set))
        future: Future[Path] = Future()
        future.set_result(built)
        return future

    def program(self, sources: list[Path], flags: str) -> Path:
        return self.link([self.start(source, flags) for source in sources], flags)

    def link(self, objects: list[Future[Path]], flags: str) -> Path:
        paths = [each.result() for each in objects]
        made_of = hashlib.sha256(f"{paths} {flags}".encode()).hexdigest()
        target = self._folder / f"{paths[0].stem}-{made_of[:16]}-{os.getpid()}"
        self._run(["g++", *shlex.split(flags), *map(str, paths)], target)
        return target

    def finish(self) -> None:
        """Waits for all that was started, whatever came of it."""
        wait(self._objects.values())

    def stop(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _compile(self, source: Path, flags: str, target: Path) -> Path:
        with target.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                self._run(["g++", *shlex.split(flags), "-c", str(source)], target)
        return target

    def _run(self, command: list[str], target: Path) -> None:
        polite = ["nice", "-n", "5"] if shutil.which("nice") else []
        command = [*polite, *command, "-o", str(target)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise AssertionError(f"{' '.join(command)}\n{done.stderr[-4000:]}")


PROTOCOLS = [
    TESTS / "protocols.cpp",
    ROOT / "csrc" / "host.cpp",
    ROOT / "csrc" / "shared_memory.cpp",
]
LAUNCHES = [
    TESTS / "launches.cpp",
    ROOT / "csrc" / "cuda_communicator.cpp",
    ROOT / "csrc" / "host.cpp",
    ROOT / "csrc" / "shared_memory.cpp",
]
# What a communicator of GPUs launches, with kernels that run on threads.
LAUNCH_CASES = ["all_reduce", "others", "mismatch", "never_launched", "lost", "killed"]
LAUNCH_CASES += ["not_missed", "closing", "arguments", "encoded", "encoded_failures"]
WIRES = [
    TESTS / "wires.cpp",
    ROOT / "csrc" / "host.cpp",
    ROOT / "csrc" / "shared_memory.cpp",
]
UNITS = [TESTS / "units.cpp"]
# As the library's, with vectors but without what else -O3 does: it takes several times as long.
VECTORS = FLAGS.replace("-O3", "-O1 -ftree-vectorize -fvect-cost-model=dynamic")
UNIT_FLAGS = {"checked": f"{CHECKED} {SANITIZERS['address']}"} | {
    name: f"{VECTORS} {flags} -iquote csrc" for name, flags in INSTRUCTION_SETS.items()
}
WIRE_FLAGS = {"checked": f"{CHECKED} {SANITIZERS['address']}", "shipped": f"{FLAGS} -iquote csrc"}


def strict_flags(instruction_set: str) -> str:
    """Warnings are errors."""
    return f"{FLAGS} -Werror {INSTRUCTION_SETS[instruction_set]}"


def built_strictly(source: Path, instruction_set: str) -> Path | None:
    """The object that setup.py has made so, of the sources as they are now."""
    folder = ROOT / "build" / "fastreduce._C"
    name = f"{source.stem}_{instruction_set}.o" if source == KERNELS else f"{source.stem}.o"
    with contextlib.suppress(OSError):
        made = (folder / name).stat().st_mtime
        newest = max(path.stat().st_mtime for path in (ROOT / "csrc").iterdir())
        rules = (folder / "build.ninja").read_text()
        wanted = rf"^cxx = (?:c|g)\+\+\nflags = {re.escape(FLAGS)} -Werror$"
        kernels = f"  set = {INSTRUCTION_SETS[instruction_set]}\n"
        as_wanted = re.search(wanted, rules, re.MULTILINE) and kernels in rules
        if made > newest and as_wanted:
            return folder / name
    return None


STRICT = [(path, "baseline") for path in SOURCES] + [
    (KERNELS, name) for name in INSTRUCTION_SETS if name != "baseline"
]


@functools.cache
def start_building(folder: Path) -> Builder:
    """Has everything compiled that the tests of this file use, the slowest first: while the tests
    of other files run, see conftest.py."""
    made = Builder(folder)
    for flags in reversed(SANITIZERS.values()):
        for source in PROTOCOLS:
            made.start(source, f"{CHECKED} {flags}")
    made.start(LAUNCHES[0], f"{CHECKED} {SANITIZERS['thread']}")
    for flags in WIRE_FLAGS.values():
        made.start(WIRES[0], flags)
    for flags in UNIT_FLAGS.values():
        made.start(UNITS[0], flags)
    for path, name in STRICT:
        made.strictly(path, name)
    return made


@pytest.fixture(scope="session")
def builder(objects: Path) -> Iterator[Builder]:
    made = start_building(objects)
    yield made
    made.stop()


class Program:
    """A sanitized program. Where address space randomisation leaves no room for the sanitizer's
    own memory, it runs without."""

    def __init__(self, builder: Builder, sources: list[Path], sanitizer: str) -> None:
        path = builder.program(sources, f"{CHECKED} {SANITIZERS[sanitizer]}")
        builder.finish()  # ranks that share a core with a compiler wait long for each other
        self._command = [str(path)]
        if "unexpected memory mapping" in self.run("list").stderr:
            self._command = ["setarch", platform.machine(), "-R", str(path)]
            if shutil.which("setarch") is None or self.run("list").returncode != 0:
                pytest.skip("the sanitizer cannot run on this kernel")

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self._command, *arguments],
            env=os.environ | ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )


@pytest.fixture(scope="session")
def thread_program(builder: Builder) -> Program:
    return Program(builder, PROTOCOLS, "thread")


@pytest.fixture(scope="session")
def address_program(builder: Builder) -> Program:
    return Program(builder, PROTOCOLS, "address")


@pytest.fixture(scope="session")
def launch_program(builder: Builder) -> Program:
    return Program(builder, LAUNCHES, "thread")


@functools.cache
def expect_healthy_without_sabotage(program: Program, case: str) -> None:
    """So that it is the sabotage that another run reports."""
    expect_healthy(program.run(case, "none"))


def expect_healthy(done: subprocess.CompletedProcess[str]) -> None:
    assert (done.returncode, done.stderr) == (0, "")


def test_every_case_and_sabotage_is_used(address_program: Program) -> None:
    done = address_program.run("list")
    expect_healthy(done)
    listed = [tuple(line.split()) for line in done.stdout.splitlines()]
    assert [name for what, name in listed if what == "case"] == list(SABOTAGES)
    used = {name for _, name in [*pairs(SABOTAGES), *FAULTS]}
    assert {name for what, name in listed if what == "sabotage"} == used | {"none"}


@pytest.mark.parametrize("case", SABOTAGES)
def test_no_race(thread_program: Program, case: str) -> None:
    expect_healthy(thread_program.run(case))


@pytest.mark.parametrize("case", SABOTAGES)
def test_no_stray_access(address_program: Program, case: str) -> None:
    expect_healthy(address_program.run(case))


@pytest.mark.parametrize(("case", "sabotage"), pairs(SABOTAGES))
def test_race_is_noticed(thread_program: Program, case: str, sabotage: str) -> None:
    expect_healthy_without_sabotage(thread_program, case)
    done = thread_program.run(case, sabotage)
    # Who overwrites a message that has not been read makes its reader wait in vain.
    kinds = {REPORTED: "data race", WRONG: "wrong result"}
    if sabotage == "same_inbox":
        kinds[GAVE_UP] = "gave up"
    assert done.returncode in kinds, done.stderr
    assert kinds[done.returncode] in done.stderr


@pytest.mark.parametrize(("case", "sabotage"), pairs(VISIBLE))
def test_wrong_result_is_noticed(address_program: Program, case: str, sabotage: str) -> None:
    expect_healthy_without_sabotage(address_program, case)
    done = address_program.run(case, sabotage)
    assert done.returncode == WRONG, done.stderr
    assert "wrong result" in done.stderr


@pytest.mark.parametrize(("case", "sabotage"), FAULTS)
def test_fault_is_noticed(address_program: Program, case: str, sabotage: str) -> None:
    expect_healthy_without_sabotage(address_program, case)
    done = address_program.run(case, sabotage)
    assert done.returncode == REPORTED, done.stderr
    assert FAULTS[case, sabotage] in done.stderr


@pytest.mark.parametrize("case", LAUNCH_CASES)
def test_launches(launch_program: Program, case: str) -> None:
    assert case in launch_program.run("list").stdout.split()
    expect_healthy(launch_program.run(case))


@pytest.mark.parametrize("sabotage", ["no_wait", "no_block_barrier"])
def test_race_of_encoded_launches_is_noticed(launch_program: Program, sabotage: str) -> None:
    done = launch_program.run("encoded", sabotage)
    assert done.returncode == REPORTED, done.stderr
    assert "data race" in done.stderr


@pytest.mark.parametrize("build", UNIT_FLAGS)
def test_arithmetic_and_schedules(builder: Builder, build: str) -> None:
    program = builder.program(UNITS, UNIT_FLAGS[build])
    done = subprocess.run(
        [program],
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    if done.returncode == 77:
        pytest.skip(f"this processor has no {build}")
    expect_healthy(done)


@pytest.fixture(scope="session")
def shipped_wires(builder: Builder) -> Path:
    """Over the kernels of all instruction sets, as they are compiled for the library."""
    objects = [builder.start(WIRES[0], WIRE_FLAGS["shipped"])]
    objects += [builder.strictly(source, "baseline") for source in WIRES[1:]]
    objects += [builder.strictly(KERNELS, name) for name in INSTRUCTION_SETS]
    return builder.link(objects, WIRE_FLAGS["shipped"])


def run_wires(program: Path, name: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [program, name],
        env=os.environ | ENVIRONMENT | {"FASTREDUCE_ISA": name},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )


@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_messages_are_the_same_bytes(shipped_wires: Path, name: str) -> None:
    done = run_wires(shipped_wires, name)
    if done.returncode == 77:
        pytest.skip(f"this processor has no {name}")
    expect_healthy(done)


def test_messages_are_checked(builder: Builder) -> None:
    expect_healthy(run_wires(builder.program(WIRES, WIRE_FLAGS["checked"]), "baseline"))


each_strict = pytest.mark.parametrize(
    ("source", "name"), STRICT, ids=[f"{source.stem}-{name}" for source, name in STRICT]
)


@each_strict
def test_gcc_warns_of_nothing(builder: Builder, source: Path, name: str) -> None:
    builder.strictly(source, name).result()


@pytest.mark.skipif(shutil.which("clang++") is None, reason="no clang++ here")
@each_strict
def test_clang_warns_of_nothing(source: Path, name: str) -> None:
    flags = f"{FLAGS} -Werror {INSTRUCTION_SETS[name]} -fsyntax-only"
    done = subprocess.run(
        ["clang++", *shlex.split(flags), str(source)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def foreign_functions(compiled: Path, name: str) -> list[str]:
    """The functions of an object that a linker may merge with another object's of the same name,
    though they are compiled for one instruction set: all but those of its own namespace."""
    symbols = subprocess.run(
        ["nm", "-C", compiled], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    merged = [line for line in symbols if line[17:18] in ("W", "V", "u")]
    own = f"fastreduce::{name}::"
    # A pointer to the C++ library's own function.
    return [line for line in merged if own not in line and " DW.ref.__gxx_" not in line]


needs_nm = pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm")


@needs_nm
@pytest.mark.parametrize("name", [name for name in INSTRUCTION_SETS if name != "baseline"])
def test_no_function_is_shared_between_instruction_sets(builder: Builder, name: str) -> None:
    assert foreign_functions(builder.strictly(KERNELS, name).result(), name) == []


@needs_nm
def test_shared_function_is_noticed(builder: Builder, tmp_path: Path) -> None:
    source = tmp_path / "shared.cpp"
    source.write_text(
        "namespace fastreduce {\n"
        "template <class T> __attribute__((noinline)) T twice(T x) { return x + x; }\n"
        "namespace avx512 { float four_times(float x) { return twice(twice(x)); } }\n"
        "}\n"
    )
    found = foreign_functions(builder.start(source, FLAGS).result(), "avx512")
    assert len(found) == 1
    assert "fastreduce::twice" in found[0]
