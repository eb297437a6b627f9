"""The command line: ``fastreduce`` or ``python -m fastreduce``."""

from __future__ import annotations

import argparse
import importlib.util
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


def _check_epochs(value: int) -> None:
    if value < 1:
        raise ValueError(f"expected at least 1, got {value}")


def _check_seed(value: int) -> None:
    if not 0 <= value < 1 << 63:
        raise ValueError(f"expected 0 to 2**63 - 1, got {value}")


def _parser() -> argparse.ArgumentParser:
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
        "--epochs", type=_integer(_check_epochs), default=15, help="passes over the digits"
    )
    demo.add_argument("--seed", type=_integer(_check_seed), default=0, help="of weights and order")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status."""
    options = _parser().parse_args(arguments)
    if importlib.util.find_spec("sklearn") is None:
        print("fastreduce demo needs scikit-learn: pip install scikit-learn", file=sys.stderr)
        return 2
    from fastreduce import demo

    return demo.run(options.ranks, options.epochs, options.seed)


if __name__ == "__main__":
    sys.exit(main())
