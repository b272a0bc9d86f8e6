"""Whoever asks, as an anonymous number: all that snapshots and the worker know of them."""

import itertools
from collections import OrderedDict
from collections.abc import Hashable

KNOWN_CLIENTS = 10_000


class Clients:
    """Numbers from 1. Whoever was not heard of for longest is forgotten first, and comes back as somebody else."""

    def __init__(self) -> None:
        self._numbers: OrderedDict[Hashable, int] = OrderedDict()
        self._next = itertools.count(1)

    def number(self, client: Hashable) -> int:
        if client not in self._numbers:
            self._numbers[client] = next(self._next)
        self._numbers.move_to_end(client)
        if len(self._numbers) > KNOWN_CLIENTS:
            self._numbers.popitem(last=False)
        return self._numbers[client]
