"""The line of unfinished generations, in order of arrival: who stands where, and when it will be served.

Times are estimates in seconds, from the tokens still owed and the tokens a second of when anything last ran.
"""

from collections.abc import Sequence as SequenceOf

from engine.config import EngineConfig
from engine.errors import EngineBusy
from engine.generation import Generation
from engine.requests import Requests

MAX_RACES = 8
RACE_GUESS_S = 10.0


def place(generation: Generation, unfinished: SequenceOf[Generation]) -> int:
    """From 1 for the next to be admitted; 0 for one that does not wait."""
    waiting = [other.id for other in unfinished if other.state == "waiting"]
    return waiting.index(generation.id) + 1 if generation.id in waiting else 0


def seconds_until_admitted(
    generation: Generation, unfinished: SequenceOf[Generation], rows: int, speed: float
) -> float | None:
    """None where no speed was measured yet."""
    if not speed:
        return None
    before = [other for other in unfinished if other.id < generation.id]
    return 0.0 if len(before) < rows else _owed(before) / speed


def seconds_until_served(unfinished: SequenceOf[Generation], rows: int, speed: float) -> float:
    """Until everything in the line is done; a guess of 1 token a row and second before anything was measured."""
    return max(_owed(unfinished) / (speed or rows), 1.0)


def refuse_if_full(unfinished: SequenceOf[Generation], config: EngineConfig, speed: float) -> None:
    """`EngineBusy` when as many wait as may."""
    waiting = len(unfinished) - config.max_batch_size
    if waiting >= config.max_waiting:
        raise EngineBusy(max(waiting, 0), seconds_until_served(unfinished, config.max_batch_size, speed))


def refuse_race_if_full(requests: Requests, config: EngineConfig, speed: float) -> None:
    """The same for races, which run one after another."""
    races = len(requests.comparisons)
    if races >= MAX_RACES:
        served_s = seconds_until_served(list(requests.generations.values()), config.max_batch_size, speed)
        raise EngineBusy(races, served_s + RACE_GUESS_S * races)


def _owed(generations: SequenceOf[Generation]) -> int:
    """Tokens that the engine may still have to make for these."""
    return sum(g.sequence.params.max_new_tokens - len(g.events) for g in generations)
