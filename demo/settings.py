"""The page's own settings: environment variables with the prefix `KVSCOPE_`, beside the engine's."""

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from engine.config import read_settings


class PageSettings(BaseSettings):
    """What the page allows its visitors."""

    model_config = SettingsConfigDict(env_prefix="KVSCOPE_", env_ignore_empty=True, frozen=True, extra="ignore")

    max_per_visitor: int = Field(
        default=64, ge=1, le=100_000, description="requests one visitor (an open page, a client) may have at once"
    )
    max_per_address: int = Field(
        default=128, ge=1, le=100_000, description="requests one network address may have at once"
    )
    max_races_per_visitor: int = Field(default=2, ge=1, le=64, description="races one visitor may have at once")
    max_races_per_address: int = Field(default=4, ge=1, le=64, description="races one network address may have at once")
    visitors_per_press: int = Field(
        default=6, ge=1, le=64, description="requests that 'Bring visitors' adds, and most that one visitor may have"
    )
    max_brought_per_address: int = Field(
        default=12, ge=0, le=1024, description="brought visitors alive at once for one network address"
    )
    max_brought_visitors: int = Field(
        default=24, ge=0, le=1024, description="brought visitors alive at once, all pages together"
    )
    max_streams: int = Field(
        default=512, ge=16, le=100_000, description="streams and races the web server carries at once"
    )


def load_settings() -> PageSettings:
    """The page's settings from the environment; `ValueError` with one line on what is wrong."""
    return read_settings(PageSettings)
