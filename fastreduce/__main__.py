"""The command line: ``fastreduce`` or ``python -m fastreduce``."""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.util
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from torch.multiprocessing.spawn import ProcessException

import fastreduce
from fastreduce.options import CommandError, UsageError

# Command -> the module that has it, and what it is for. The module's ``configure`` adds options,
# and sets as ``run`` what takes these and returns the exit status.
_COMMANDS = {
    "demo": ("demo", "train on handwritten digits: one process, DDP over gloo, with fastreduce"),
    "doctor": ("doctor", "say what this machine can do, which way messages take, what is wrong"),
    "plan": (
        "plan_command",
        "say whether a model fits and what communication will cost, without a GPU",
    ),
    "bench": ("bench_command", "time all-reduce by size, beside the process group's own"),
    "tune": ("tune_command", "measure which algorithm is the fastest here, and remember it"),
}


class _Command(argparse.ArgumentParser):
    """Its module is imported once it is asked for. Errors are short, and say where to look."""

    def __init__(self, *, module: str, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)
        self._module = module

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self._module:
            importlib.import_module(f"fastreduce.{self._module}").configure(self)
            self._module = ""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options = [name for action in self._actions for name in action.option_strings]
            close = difflib.get_close_matches(unknown[0].partition("=")[0], options, n=1)
            self.error(
                f"unrecognized arguments: {' '.join(unknown)}"
                + (f" (did you mean {close[0]}?)" if close else "")
            )
        return found, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\nsee {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fastreduce",
        description=fastreduce.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n"
        "  fastreduce doctor\n"
        "  fastreduce plan --model resnet50 --batch 256 --ranks 16\n"
        "  fastreduce tune --help\n\n"
        "exit status: 0 done, 1 it failed or something was found, 2 wrong arguments, 130 "
        "interrupted",
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"fastreduce {fastreduce.__version__} "
        f"({'with' if importlib.util.find_spec('fastreduce._cuda') else 'without'} CUDA kernels)",
    )
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="command", parser_class=_Command
    )
    for name, (module, about) in _COMMANDS.items():
        commands.add_parser(
            name, module=module, help=about, description=f"{about[0].upper()}{about[1:]}."
        )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
        sys.stdout.flush()
        return status
    except UsageError as error:
        print(f"fastreduce {options.command}: {error}", file=sys.stderr)
        return 2
    except CommandError as error:
        print(f"fastreduce {options.command}: {error}", file=sys.stderr)
        return 1
    except ProcessException as error:
        print(f"\nfastreduce {options.command}: a rank failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # fastreduce plan | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the end
        return 128 + signal.SIGPIPE


if __name__ == "__main__":
    sys.exit(main())
