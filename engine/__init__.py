"""KVScope's engine: many sequences, one batch, one key-value cache."""

from engine.comparison import Comparison
from engine.config import EngineConfig, load_config
from engine.engine import Engine
from engine.errors import EngineBusy, EngineNotReady, EngineStopped, GenerationError, LoadingError
from engine.generation import Generation, GenerationResult, TokenEvent, TopToken
from engine.params import SamplingParams

__all__ = [
    "Comparison",
    "Engine",
    "EngineBusy",
    "EngineConfig",
    "EngineNotReady",
    "EngineStopped",
    "Generation",
    "GenerationError",
    "GenerationResult",
    "LoadingError",
    "SamplingParams",
    "TokenEvent",
    "TopToken",
    "load_config",
]
