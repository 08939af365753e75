"""How commands end: one clear line for a mistake, silence for Ctrl-C and closed pipes.

Exit status: 0 done; 1 the machine failed (a full disk, a file that cannot be read); 2 the call was wrong or cannot
be served; 130 interrupted. With PORTADRAFT_DEBUG set (to more than 0), tracebacks are shown instead.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any, ParamSpec, TypeVar

import typer

from portadraft.errors import PortadraftError

P = ParamSpec("P")
R = TypeVar("R")

INTERRUPTED = 130


def guarded(command: Callable[P, R]) -> Callable[P, R]:
    """Wrap a command so that it ends as this module says."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        _quiet()
        try:
            result = command(*args, **kwargs)
            if sys.stdout is not None:  # None: it was closed
                sys.stdout.flush()
            return result
        except BrokenPipeError:
            # The reader has gone (`| head`): nothing to say, and nothing to flush at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except (PortadraftError, OSError) as error:
            if os.environ.get("PORTADRAFT_DEBUG", "0") not in ("", "0"):
                raise
            complain(f"error: {error}")
            raise typer.Exit(2 if isinstance(error, PortadraftError) else 1) from None

    return run


def interrupt_imports() -> None:
    """From now on Ctrl-C ends the process at once while torch or mlx is being imported.

    Their native code imports more of them, and an exception that comes up through it aborts the process with a
    message of its own. Nothing that would have to be put away exists by then.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return  # ignored (nohup), or somebody else's

    def interrupted(number: int, frame: FrameType | None) -> None:
        if any(_being_imported(name) for name in ("torch", "mlx.core")):
            os._exit(INTERRUPTED)
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, interrupted)


def interrupt_shutdown() -> None:
    """From now on Ctrl-C ends the process at once: the command is over, and libraries clear up for a second or two."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(INTERRUPTED))


def _being_imported(name: str) -> bool:
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


def complain(message: str) -> None:
    """One line on standard error."""
    if sys.stderr is not None:  # print takes None for standard output
        print(f"portadraft: {' '.join(message.split())}", file=sys.stderr)


def _quiet() -> None:
    """Warnings as one line each; the hub's and transformers' progress bars and chatter off, unless asked for."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if sys.stderr is None or not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

    def show(message: Warning | str, category: type[Warning], *rest: Any) -> None:
        complain(f"warning: {message}")

    warnings.showwarning = show  # type: ignore[assignment]  # the rest of its arguments is not of interest
