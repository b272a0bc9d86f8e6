"""What Gradio remembers of visitors and calls, and when it lets go: as it comes, it keeps nearly all of it.

Of every session a copy of the page's whole configuration with the visitor's texts in it (170 KB, for links that share
them), and components that it makes anew while calls are answered; of every call a record for a table of statistics that
it draws up again at the end of each, and the messages of answers that nobody fetched, until the 2,000th later call
throws out the oldest session's, fetched or not.
"""

import asyncio
from types import SimpleNamespace
from typing import Any

from gradio import state_holder
from gradio.blocks import Blocks
from gradio.components import State
from gradio.queueing import Event, Queue
from gradio.utils import LRUCache

UNFETCHED_S = 60.0  # that long an answer waits for somebody who asks for it
MOST_UNFETCHED = 20_000
MOST_UNREAD = 16  # messages that wait for a reader before its stream holds back the next


class Session(state_holder.SessionState):
    """A visitor's state, and no copy of the page or of what was typed there."""

    def __init__(self, blocks: Blocks):
        super().__init__(SimpleNamespace(default_config=blocks.default_config, blocks={}))  # type: ignore[arg-type]

    def __setitem__(self, key: int, value: Any) -> None:
        # `gr.skip()` makes a component anew, which would be kept, under its own number, too, by every later call.
        if isinstance(self.blocks_config.blocks.get(key), State):
            super().__setitem__(key, value)

    def _update_config(self, key: int) -> None:
        pass

    def _update_value_in_config(self, key: int, value: Any) -> None:
        pass


class Calls(Queue):
    """Gradio's queue, with the end of a call for its end in memory, too."""

    def __init__(self, page: Blocks, most: int):
        super().__init__(True, most, 1, most, page, None)
        self.ANALYTICS_MAX_EVENTS = 0
        self.pending_messages_per_session = LRUCache(MOST_UNFETCHED)
        # Gradio looks for new events a thousand times a second, which costs a tenth of a core when nobody is here
        # and disturbs the worker's threads when somebody is.
        self.sleep_when_free = 0.02

    def known(self, session_or_event: str) -> bool:
        """Whether there is anything to be fetched under that name."""
        name = session_or_event
        if name in self.pending_messages_per_session or name in self.event_ids_to_events:
            return True
        return any(name in events for events in self.pending_event_ids_session.values())

    def reader_is_behind(self, session: str | None) -> bool:
        """Whether so much waits to be read there that another message had better wait, too."""
        messages = self.pending_messages_per_session.get(session or "")
        if messages is None or messages.qsize() < MOST_UNREAD:
            return False
        return all(event.alive for event in self.event_ids_to_events.values() if event.session_hash == session)

    async def process_events(self, events: list[Event], *how: Any) -> None:
        """Serve them; forget them once their readers have had time to read."""
        try:
            await super().process_events(events, *how)
        finally:
            for event in events:
                if event.session_hash == event._id:  # a program's call, which has a session for itself
                    self.blocks.state_holder.session_data.pop(event._id, None)
                    self.blocks.state_holder.time_last_used.pop(event._id, None)
                asyncio.get_running_loop().call_later(UNFETCHED_S, self._forget, event.session_hash, event._id)

    def _forget(self, session: str, event_id: str) -> None:
        unfetched = self.pending_event_ids_session.get(session, set())
        unfetched.discard(event_id)
        if not unfetched:
            self.pending_event_ids_session.pop(session, None)
            self.pending_messages_per_session.pop(session, None)


def adapt() -> None:
    """Once in a process: Gradio finds the class by this name at each new session."""
    vars(state_holder)["SessionState"] = Session
