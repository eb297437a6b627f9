"""Builds fastreduce._C with ninja: plain C++, no torch header, one object per instruction set.

With nvcc it also builds fastreduce._cuda, for all GPUs of CAPABILITIES that this nvcc knows. In the
environment: FASTREDUCE_CUDA=0 leaves it out, =1 insists on it; FASTREDUCE_CUDA_ARCHS names others
("90" for Hopper alone: a sixth of the time)."""

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pybind11
from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

SOURCES = Path("csrc")
FLAGS = (
    "-std=c++17 -O3 -fPIC -fvisibility=hidden -pthread -Wall -Wextra "
    # Bits must not depend on the compiler: no fused multiply-add of what is written as two.
    "-ffp-contract=off -fno-math-errno -fno-trapping-math"
)
KERNELS = "host_kernels"
CUDA = "cuda_"  # what the names of the CUDA extension's C++ sources begin with
BINDINGS = "bindings"  # what the names of those end with that know Python
CAPABILITIES = (80, 86, 89, 90, 100, 120)
NVCC_FLAGS = (
    # As for the host: no fused multiply-add. What needs a stack or spills is said.
    "-std=c++17 -O3 -fmad=false --threads 2 -Xptxas -warn-spills,-warn-lmem-usage"
)


def instruction_sets() -> dict[str, str]:
    """Name -> flags of every instruction set that the kernels are compiled for."""
    sets = {"baseline": ""}
    if platform.machine() in ("x86_64", "AMD64"):
        sets["avx2"] = "-mavx2 -mfma -mbmi -mbmi2 -mf16c"
        sets["avx512"] = (
            sets["avx2"] + " -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512cd"
            " -mprefer-vector-width=512"
        )
    return sets


def cuda_compiler() -> str | None:
    """nvcc, or None where the CUDA target is not to be built."""
    wish = os.environ.get("FASTREDUCE_CUDA", "")
    home = os.environ.get("CUDA_HOME") or "/usr/local/cuda"
    found = shutil.which("nvcc") or shutil.which("nvcc", path=str(Path(home) / "bin"))
    if wish == "1" and found is None:
        raise SystemExit("fastreduce: FASTREDUCE_CUDA=1, but there is no nvcc on PATH")
    return None if wish == "0" else found


def cuda_targets(nvcc: str) -> str:
    """nvcc's flags for machine code of every capability, and PTX of the newest."""
    listed = subprocess.run([nvcc, "--list-gpu-arch"], check=True, capture_output=True, text=True)
    known = {int(line.removeprefix("compute_")) for line in listed.stdout.split()}
    named = os.environ.get("FASTREDUCE_CUDA_ARCHS", "").replace(",", " ").split()
    numbers = [each.replace(".", "") for each in named]
    if wrong := [each for each in numbers if not each.isdigit() or int(each) not in known]:
        raise SystemExit(
            "fastreduce: FASTREDUCE_CUDA_ARCHS: expected compute capabilities such as 90 or 8.0, "
            f"of those that {nvcc} knows ({', '.join(map(str, sorted(known)))}), got "
            f"{' '.join(wrong)}"
        )
    wanted = sorted(map(int, numbers)) or [each for each in CAPABILITIES if each in known]
    flags = [f"-gencode=arch=compute_{each},code=sm_{each}" for each in wanted]
    return " ".join([*flags, f"-gencode=arch=compute_{wanted[-1]},code=compute_{wanted[-1]}"])


def ninja_program() -> str:
    """The ninja of the build environment, whose scripts need not be on PATH, or the system's."""
    try:
        import ninja

        return str(Path(ninja.BIN_DIR) / "ninja")
    except ImportError:
        found = shutil.which("ninja")
        if found is None:
            raise SystemExit("fastreduce: building needs ninja (pip install ninja)") from None
        return found


def escape(path: object) -> str:
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def host_rules(target: Path, include: str) -> list[str]:
    """``include``: for bindings. It is another one in every build environment, and nothing else is
    to be compiled anew for that."""
    compiler = os.environ.get("CXX", "c++")
    rules = [
        f"cxx = {compiler}",
        f"flags = {FLAGS} {os.environ.get('CXXFLAGS', '')}",
        "rule compile",
        "  command = $cxx $flags $set -MMD -MF $out.d -c $in -o $out",
        "  deps = gcc",
        "  depfile = $out.d",
        "rule link",
        f"  command = $cxx -shared -pthread $in -o $out {os.environ.get('LDFLAGS', '')}",
    ]
    objects = []
    for name, flags in instruction_sets().items():
        objects.append(f"{KERNELS}_{name}.o")
        rules += [
            f"build {objects[-1]}: compile {escape(SOURCES.resolve() / (KERNELS + '.cpp'))}",
            f"  set = {flags} -DFR_ISA={name}",
        ]
    for path in sorted(SOURCES.resolve().glob("*.cpp")):
        if path.stem != KERNELS and not path.stem.startswith(CUDA):
            objects.append(f"{path.stem}.o")
            rules.append(f"build {objects[-1]}: compile {escape(path)}")
            if path.stem.endswith(BINDINGS):
                rules.append(f"  set = {include}")
    return [*rules, f"build {escape(target)}: link {' '.join(objects)}"]


def cuda_rules(nvcc: str, target: Path, include: str) -> list[str]:
    """nvcc compiles the C++ sources too: it knows where its headers and its runtime are."""
    host = f"-Xcompiler={','.join(FLAGS.replace('-std=c++17 -O3 ', '').split())}"
    # A launcher in front of the compiler (ccache g++) is not for nvcc.
    compiler = f"-ccbin={os.environ['CXX'].split()[-1]}" if os.environ.get("CXX") else ""
    rules = [
        f"nvcc = {escape(nvcc)} {compiler}",
        f"cuflags = {NVCC_FLAGS} {host}",
        "rule cuda",
        "  command = $nvcc $cuflags $set -MMD -MF $out.d -c $in -o $out",
        "  deps = gcc",
        "  depfile = $out.d",
        "rule link_cuda",
        "  command = $nvcc -shared -cudart static $in -o $out",
    ]
    objects = []
    # The slowest first.
    for path in sorted(SOURCES.resolve().glob("*.cu"), key=lambda path: -path.stat().st_size):
        objects.append(f"{path.stem}_cu.o")
        rules += [
            f"build {objects[-1]}: cuda {escape(path)}",
            f"  set = {cuda_targets(nvcc)}",
        ]
    plain = [*SOURCES.resolve().glob(f"{CUDA}*.cpp"), SOURCES.resolve() / "shared_memory.cpp"]
    for path in sorted(plain):
        objects.append(f"{path.stem}.o")
        rules.append(f"build {objects[-1]}: cuda {escape(path)}")
        if path.stem.endswith(BINDINGS):
            rules.append(f"  set = {include}")
    return [*rules, f"build {escape(target)}: link_cuda {' '.join(objects)}"]


class NinjaBuild(build_ext):
    def build_extension(self, ext: Extension) -> None:
        # Not in a folder that pip makes anew each time: the next build compiles what has changed.
        work = Path("build").resolve() / ext.name
        work.mkdir(parents=True, exist_ok=True)
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        include = f"-isystem {pybind11.get_include()} -isystem {sysconfig.get_path('include')}"
        nvcc = cuda_compiler()
        if ext.name.endswith("._cuda"):
            assert nvcc is not None
            rules = cuda_rules(nvcc, target, include)
        else:
            rules = host_rules(target, include)
        (work / "build.ninja").write_text("\n".join(rules) + "\n")
        subprocess.run([ninja_program(), "-C", str(work)], check=True, stdout=sys.stderr)


class FreshBuild(build):
    def run(self) -> None:
        # All that lies there goes into the wheel: modules that are no more, an earlier _cuda. What
        # --build-lib names instead may be anything, the sources too.
        place = Path(self.build_lib)
        if place.parent == Path(self.build_base) and place.name.startswith("lib"):
            shutil.rmtree(place, ignore_errors=True)
        super().run()


EXTENSIONS = ["fastreduce._C", *(["fastreduce._cuda"] if cuda_compiler() else [])]

setup(
    ext_modules=[Extension(name, sources=[]) for name in EXTENSIONS],
    cmdclass={"build": FreshBuild, "build_ext": NinjaBuild},
)
