"""Builds fastreduce._C with ninja: plain C++, no torch header, one object per instruction set."""

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pybind11
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = Path("csrc")
FLAGS = (
    "-std=c++17 -O3 -fPIC -fvisibility=hidden -pthread -Wall -Wextra "
    # Bits must not depend on the compiler: no fused multiply-add of what is written as two.
    "-ffp-contract=off -fno-math-errno -fno-trapping-math"
)
KERNELS = "host_kernels"


def instruction_sets() -> dict[str, str]:
    """Name -> flags of every instruction set that the kernels are compiled for."""
    sets = {"baseline": ""}
    if platform.machine() in ("x86_64", "AMD64"):
        sets["avx2"] = "-mavx2 -mbmi -mbmi2 -mf16c"
        sets["avx512"] = (
            sets["avx2"] + " -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512cd"
            " -mprefer-vector-width=512"
        )
    return sets


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


class NinjaBuild(build_ext):
    def build_extension(self, ext: Extension) -> None:
        source = SOURCES.resolve()
        work = Path(self.build_temp).resolve()
        work.mkdir(parents=True, exist_ok=True)
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        target.parent.mkdir(parents=True, exist_ok=True)

        def escape(path: object) -> str:
            return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")

        include = f"-isystem {pybind11.get_include()} -isystem {sysconfig.get_path('include')}"
        rules = [
            f"cxx = {os.environ.get('CXX', 'c++')}",
            f"flags = {FLAGS} {include} {os.environ.get('CXXFLAGS', '')}",
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
                f"build {objects[-1]}: compile {escape(source / (KERNELS + '.cpp'))}",
                f"  set = {flags} -DFR_ISA={name}",
            ]
        for path in sorted(source.glob("*.cpp")):
            if path.stem != KERNELS:
                objects.append(f"{path.stem}.o")
                rules.append(f"build {objects[-1]}: compile {escape(path)}")
        rules.append(f"build {escape(target)}: link {' '.join(objects)}")
        (work / "build.ninja").write_text("\n".join(rules) + "\n")
        subprocess.run([ninja_program(), "-C", str(work)], check=True, stdout=sys.stderr)


setup(ext_modules=[Extension("fastreduce._C", sources=[])], cmdclass={"build_ext": NinjaBuild})
