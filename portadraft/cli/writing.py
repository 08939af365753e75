"""What to say of places that cannot be written to: which, why, and what to do; not the temporary file at which it
was noticed.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

from portadraft.errors import InvalidArgument, PortadraftError
from portadraft.profiles.home import user_folder

_FAILURES = (errno.ENOSPC, errno.EIO, errno.EDQUOT)
"""Of the machine, whatever is asked for."""
_REASONS = {errno.EEXIST: "it is a file", errno.ENOENT: "it cannot be made"}


@contextlib.contextmanager
def writing(what: str, expected: str) -> Iterator[None]:
    """Around what writes to a place. what: names it. expected: what to do.

    Raises: InvalidArgument for what another argument mends; OSError where the machine failed.
    """
    try:
        yield
    except PortadraftError:
        raise
    except OSError as error:
        if error.errno is None or error.errno in _FAILURES:
            raise OSError(f"{what}: cannot be written to ({error.strerror or error})") from error
        reason = _REASONS.get(error.errno, error.strerror)
        raise InvalidArgument(f"{what}: cannot be written to ({reason}); expected {expected}") from error


def writing_own() -> contextlib.AbstractContextManager[None]:
    """The same around what writes to the user's folder of profiles."""
    home = os.environ.get("XDG_DATA_HOME")
    named = f"XDG_DATA_HOME={home!r}: " if home else ""
    expected = "one that can be written to: change its permissions, or name another place with XDG_DATA_HOME"
    return writing(f"{named}your folder {user_folder().path}", expected)
