"""The engine's settings: environment variables with the prefix `KVSCOPE_`, or keyword arguments."""

from pathlib import Path
from typing import Literal, TypeVar

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

Settings = TypeVar("Settings", bound=BaseSettings)


class EngineConfig(BaseSettings):
    """Everything that is decided before the model is loaded."""

    model_config = SettingsConfigDict(env_prefix="KVSCOPE_", env_ignore_empty=True, frozen=True, extra="forbid")

    model: str | None = Field(None, description="hub id or local folder; empty: the default model")
    revision: str | None = Field(None, description="branch, tag or commit of a hub model; empty: its main branch")
    trust_remote_code: bool = Field(False, description="run Python code that comes with the model's files")
    device: str = Field(
        "auto", description="`auto`, `cpu`, `cuda`, `cuda:N`, or `sharded`: the layers spread over all GPUs"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="`auto` is float32 on a CPU and the model's own half precision on a GPU"
    )
    quantize: Literal["none", "int8", "8bit", "4bit"] = Field(
        "none", description="`int8` weights and activations on a CPU; `8bit` or `4bit` weights by bitsandbytes on a GPU"
    )
    cache: Path = Field(Path("~/.cache/kvscope"), description="folder for converted weights")
    hub_timeout_s: float = Field(5.0, gt=0, le=600, description="seconds to wait for the model hub to answer")
    max_batch_size: int = Field(16, ge=1, le=1024, description="rows decoded together")
    max_context: int = Field(2048, ge=64, le=1_000_000, description="tokens a sequence may reach, prompt included")
    cache_tokens: int = Field(
        32_768, ge=64, description="positions the whole KV cache may hold; requests wait when theirs would not fit"
    )
    max_waiting: int = Field(256, ge=0, le=100_000, description="requests that may wait before new ones are refused")
    prefill_chunk: int = Field(128, ge=16, le=65_536, description="most prompt tokens computed in one step")
    probe_share: float = Field(
        0.1, ge=0, le=0.5, description="share of the engine's time that naive measurements may take; 0: none"
    )
    max_race_tokens: int = Field(512, ge=16, le=100_000, description="longest context of a race, prompt included")
    watchdog_s: float = Field(
        180.0, ge=0, le=86_400, description="seconds that a worker with work may be silent until it is replaced; 0: any"
    )
    drain_s: float = Field(
        8.0, ge=0, le=3600, description="seconds that answers get to finish when the server is told to end"
    )
    threads: int = Field(0, ge=0, le=1024, description="CPU threads of the worker; 0: one a core")

    @property
    def cache_folder(self) -> Path:
        return self.cache.expanduser()


def load_config(**overrides) -> EngineConfig:
    """The engine's settings from the environment and `overrides`; `ValueError` with one line on what is wrong."""
    return read_settings(EngineConfig, **overrides)


def read_settings(kind: type[Settings], **overrides) -> Settings:
    """Any group of `KVSCOPE_` settings; `ValueError` with one line naming the variable, what is wrong and its value."""
    try:
        return kind(**overrides)
    except ValidationError as error:
        first = error.errors()[0]
        if not first["loc"]:  # of several settings together, which the message names
            raise ValueError(first["msg"].removeprefix("Value error, ")) from None
        name = kind.model_config.get("env_prefix", "") + ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{name.upper()}: {first['msg']} (got {first['input']!r})") from None
