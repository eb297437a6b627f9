"""What commands show on a terminal, and nowhere else: progress and colours."""

from __future__ import annotations

import os
import sys
import threading
from typing import Literal, TextIO

from tqdm import tqdm

Colour = Literal["red", "yellow", "green"]
_CODES: dict[Colour, str] = {"red": "1;31", "yellow": "1;33", "green": "1;32"}


class _Bar(tqdm):
    """Without tqdm's thread, which no fork would survive, and without its lock between processes:
    who is killed would leave that in /dev/shm."""

    monitor_interval = 0
    _lock = threading.RLock()


def progress(total: int, what: str, *, shown: bool = True) -> tqdm[None]:
    """A bar on stderr, if that is a terminal; it is gone when it is closed.

    Args:
        total: steps; see :func:`step`.
        what: is done.
        shown: False on the other ranks.
    """
    return _Bar(
        total=total,
        desc=what,
        disable=None if shown else True,
        leave=False,
        file=sys.stderr,
        bar_format="{desc}: {bar:20} {n}/{total} [{elapsed}]{postfix}",
    )


def step(bar: tqdm[None], what: str = "") -> None:
    """One more, and what is told of it."""
    bar.set_postfix_str(what, refresh=False)
    bar.n += 1
    bar.refresh()  # which update() is not sure to do, so soon after the last one


def colours(stream: TextIO) -> bool:
    """Whether it takes them: a terminal, unless NO_COLOR is set (no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR")


def painted(text: str, colour: Colour, colours: bool) -> str:
    """In that colour, if ``colours``."""
    return f"\x1b[{_CODES[colour]}m{text}\x1b[0m" if colours else text


def busy(load: float) -> list[str]:
    """A line to be said of times that were taken while something else ran, if it did.

    Args:
        load: of the minute before.
    """
    if load < 1:
        return []
    return [
        f"The machine was busy (load {load:.1f}): times, and what is chosen by them, mean little."
    ]


def size(nbytes: int) -> str:
    """12 KiB, 23.5 GiB."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.3g} {name}"
    return f"{nbytes} bytes"
