"""GPU quota in sentences: whose counts here, what the API of ZeroGPU has said about it, and what helps.

Facts about ZeroGPU are those of its documentation and of the `spaces` package.
"""

import base64
import json
import os
import re
import time
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import Any

TOKEN_HEADER = "x-ip-token"
KNOWN_VISITORS = 10_000
REMEMBER_S = 600.0
_LEFT = re.compile(r"\((\d+)s requested vs\. (\d+)s left\)")


class Quotas:
    """Which visitors have little left: nobody tells it but a refusal, so that is where it is learned from.

    `factor` is how many seconds of a quota one second on this hardware costs. Where there are no quotas, nobody is
    ever refused one, and nobody has little left.
    """

    def __init__(self, factor: float = 1.0):
        self.factor = factor
        self._short_since: OrderedDict[Hashable, float] = OrderedDict()

    def note_little_left(self, visitor: Hashable) -> None:
        self._short_since[visitor] = time.monotonic()
        self._short_since.move_to_end(visitor)
        if len(self._short_since) > KNOWN_VISITORS:
            self._short_since.popitem(last=False)

    def little_left(self, visitor: Hashable) -> bool:
        """Whether what is left is better kept for the visitor's own questions."""
        return time.monotonic() - self._short_since.get(visitor, -REMEMBER_S) < REMEMBER_S

    def require_some(self, visitor: Hashable) -> None:
        """`ValueError` for a visitor who should not spend what is left on races and brought visitors."""
        if self.little_left(visitor):
            raise ValueError(
                "Little of your GPU quota is left, and this would spend it: it is kept for your own questions. "
                "The quota fills up again within a day; [a PRO account](https://huggingface.co/subscribe/pro) has more."
            )


def seconds_left(refusal: str) -> int | None:
    """The quota's seconds that `spaces` names when it refuses; None where it names none."""
    found = _LEFT.search(refusal)
    return int(found[2]) if found else None


def identity(headers: Mapping[str, str]) -> str:
    """Whose quota counts, if it is not simply the visitor's own: a sentence with the link that helps, or nothing."""
    token = headers.get(TOKEN_HEADER)
    if token is None:
        return (
            "Nobody is signed in here (a page embedded in another site cannot know you), so the small quota of your "
            f"network address counts. Better: [open the Space itself]({space_url()})."
        )
    error = _payload(token).get("error")
    if error:
        return (
            f"Your sign-in could not be used ({error}), so the quota of your network address counts. "
            f"Better: [open the Space again]({space_url()})."
        )
    return ""


def space_url() -> str:
    """Where this Space can be opened as a page of its own."""
    name = os.environ.get("SPACE_ID", "")
    return "https://huggingface.co/spaces" + (f"/{name}" if name else "")


def counted(seconds: int, factor: float) -> str:
    """How `seconds` of the GPU count against a quota, on hardware that counts them `factor` times."""
    return f"{seconds} s of GPU" if factor == 1 else f"{seconds} s of GPU, which count as {seconds * factor:.0f} s"


def _payload(token: str) -> dict[str, Any]:
    """What a token says; it is the API's to check whether it says the truth."""
    try:
        return dict(json.loads(base64.urlsafe_b64decode(token.split(".")[1] + "==")))
    except (ValueError, IndexError, TypeError):
        return {}
