"""What the options of all commands have in common."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

EXIT_STATUS = "exit status: 0 done, 1 it failed, 2 wrong arguments, 130 interrupted"


class UsageError(ValueError):
    """What was asked for cannot be done; its text says what is wrong, and what is allowed."""


class CommandError(RuntimeError):
    """It was tried and failed; its text says why."""


def checked(convert: Callable[[str], T]) -> Callable[[str], T]:
    """The type of an option whose ValueError says what is wrong."""

    def convert_checked(text: str) -> T:
        try:
            return convert(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert_checked


def whole(least: int = 1, most: float = math.inf) -> Callable[[str], int]:
    """A number in that range, such as 12 or 175e9."""
    allowed = f"of {least} or more" if most == math.inf else f"from {least} to {most}"

    def convert(text: str) -> int:
        written = re.fullmatch(r"-?[0-9.]+(e[0-9]+)?", text)
        with_point = set(text) & {".", "e"}
        try:
            value = (float(text) if with_point else int(text)) if written else math.nan
        except ValueError:  # 1.2.3
            value = math.nan
        if not (least <= value <= most and value < math.inf and value == int(value)):
            raise ValueError(f"expected a whole number {allowed}, got {text!r}")
        return int(value)

    return checked(convert)


def positive(text: str) -> float:
    """A number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(f"expected a number above 0, got {text!r}")
    return value
