"""What can go wrong, as sentences that can be shown to a visitor."""

CLOSED = "The engine was closed."
DRAINING = "The server is shutting down. Please come back in a minute."
DRAINED = "The server had to shut down before this was finished. Please send it again in a minute."
DIED_LOADING = "The worker that runs the model died while it was loading. See the log; then start again."
STUCK = "The worker does not answer any more, and a thread cannot be ended: the program has to be started again."


class LoadingError(RuntimeError):
    """The model cannot be loaded; the message is one line that says what to do."""


class EngineBusy(RuntimeError):
    """The waiting line is full: nothing was queued.

    `retry_after_s` estimates, from the tokens still owed and the speed of the last seconds,
    when a place will be free.
    """

    def __init__(self, waiting: int, retry_after_s: float):
        self.waiting = waiting
        self.retry_after_s = retry_after_s
        line = f"{waiting} request{' is' if waiting == 1 else 's are'} waiting"
        super().__init__(f"The line is full: {line}. Come back in about {retry_after_s:.0f} s.")


class GenerationError(RuntimeError):
    """One request failed; what it had emitted stays readable, and nobody else is affected."""


class NoLease(RuntimeError):
    """No worker was granted; a sentence for the visitor who was to pay for it."""


class EngineStopped(RuntimeError):
    """The engine was closed, or its worker cannot be started again."""


class EngineNotReady(RuntimeError):
    """The model is still being loaded."""
