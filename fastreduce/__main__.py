"""The command line: ``fastreduce`` or ``python -m fastreduce``."""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
from collections.abc import Callable, Sequence

import fastreduce


def _integer(check: Callable[[int], None]) -> Callable[[str], int]:
    """The type of an option whose value ``check`` refuses by raising ValueError."""

    def integer(text: str) -> int:
        value = int(text)
        try:
            check(value)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        return value

    return integer


def _check_ranks(value: int) -> None:
    from fastreduce import demo

    demo.check_ranks(value)


def _check_positive(value: int) -> None:
    if value < 1:
        raise ValueError(f"expected at least 1, got {value}")


def _check_seed(value: int) -> None:
    if not 0 <= value < 1 << 63:
        raise ValueError(f"expected 0 to 2**63 - 1, got {value}")


def _parser() -> argparse.ArgumentParser:
    from fastreduce import plan_command

    parser = argparse.ArgumentParser(prog="fastreduce", description=fastreduce.__doc__)
    parser.add_argument(
        "--version",
        action="version",
        version=f"fastreduce {fastreduce.__version__} "
        f"({'with' if importlib.util.find_spec('fastreduce._cuda') else 'without'} CUDA kernels)",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    about = "train on handwritten digits: one process, DDP over gloo, DDP with fastreduce"
    demo = commands.add_parser(
        "demo",
        help=about,
        description=about,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    demo.add_argument(
        "--ranks", type=_integer(_check_ranks), default=2, help="processes that share the work"
    )
    demo.add_argument(
        "--epochs", type=_integer(_check_positive), default=15, help="passes over the digits"
    )
    demo.add_argument("--seed", type=_integer(_check_seed), default=0, help="of weights and order")
    demo.set_defaults(run=_demo)
    _add_doctor(commands)
    plan_command.add_parser(commands)
    return parser


def _demo(options: argparse.Namespace) -> int:
    if importlib.util.find_spec("sklearn") is None:
        print("fastreduce demo needs scikit-learn: pip install scikit-learn", file=sys.stderr)
        return 2
    from fastreduce import demo

    return demo.run(options.ranks, options.epochs, options.seed)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected more than 0 s, got {text}")
    return value


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    about = "say what this machine can do, what fastreduce will use of it, and what is wrong"
    doctor = commands.add_parser(
        "doctor",
        help=about,
        description=f"{about[0].upper()}{about[1:]}. Exit status: 0 if all is right, 1 if "
        "something was found that does not work or is slow, 2 for wrong arguments.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n"
        "  fastreduce doctor\n"
        "  torchrun --nproc-per-node 8 -m fastreduce doctor --json > report.json\n\n"
        "Under torchrun, rank 0 prints one report for all ranks and hosts.",
    )
    doctor.add_argument("--json", action="store_true", help="print all facts, as JSON")
    doctor.add_argument(
        "--ranks",
        type=_integer(_check_positive),
        default=2,
        help="processes to try with, where torchrun has started none (default: 2)",
    )
    doctor.add_argument(
        "--timeout",
        type=_seconds,
        default=60.0,
        help="seconds that ranks wait for each other (default: 60)",
    )

    def run(options: argparse.Namespace) -> int:
        from fastreduce import doctor

        try:
            return doctor.run(as_json=options.json, ranks=options.ranks, timeout=options.timeout)
        except doctor.UsageError as error:
            print(f"fastreduce doctor: {error}", file=sys.stderr)
            return 2

    doctor.set_defaults(run=run)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status."""
    options = _parser().parse_args(arguments)
    status: int = options.run(options)
    return status


if __name__ == "__main__":
    sys.exit(main())
