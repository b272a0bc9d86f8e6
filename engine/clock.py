"""Unix seconds that never jump: the system's clock, read once, and from there on as the monotonic clock runs.

So times can be shown, and subtracted as well, whatever corrects the system's clock meanwhile. Processes of one machine
share the monotonic clock, and so say its seconds to each other.
"""

import time

_ZERO = time.time() - time.monotonic()


def now() -> float:
    return unix(time.monotonic())


def unix(monotonic_s: float) -> float:
    """The Unix seconds of a moment of `time.monotonic`."""
    return _ZERO + monotonic_s
