"""Which errors of a collective mean that another rank is gone or does not answer."""

from __future__ import annotations

import re

#: What backends and stores say then. They raise the same classes for a wrong device, a duplicate GPU, a lack of memory
#: or versions that do not fit, and those are to be told as they are.
_SAID = re.compile(
    r"gloo/transport|connection (was )?(closed|reset|refused)|broken pipe|timed out|time-?out|"
    r"ncclremoteerror|remote process|communicator was aborted|failed to recv|clients joined|did not come",
    re.IGNORECASE,
)


def lost_rank(error: BaseException) -> str | None:
    """What a backend said, if an error or one of its causes means a lost rank; None if it is another error."""
    at: BaseException | None = error
    while at is not None:
        if isinstance(at, RuntimeError) and _SAID.search(str(at)):
            said = re.sub(r"^\[\S+:\d+\] ", "", str(at).strip().partition("\n")[0])
            return said.partition(". ")[0].rstrip(".")
        at = at.__cause__ or at.__context__
    return None
