"""Environment -> Settings: every DFLASH_* variable, its type, what it accepts and how a bad value is refused."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

PREFIX = "DFLASH_"
MAX_WIDTH = 255  # no trained block is near it; keeps schedules and capture lists finite for absurd input


class SettingsError(ValueError):
    """One sentence for the operator: the variable, the value, what is accepted, what to do."""


@dataclass(frozen=True, slots=True)
class VerifyTokens:
    """What DFLASH_VERIFY_TOKENS asks for.

    mode: "stock" (no overlay, nothing changed), "static" (always `widths[0]`) or "auto" (one of `widths` per step;
    empty: the default set for the drafter).
    """

    mode: Literal["stock", "static", "auto"]
    widths: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> VerifyTokens:
        """`""`, `0`, `K`, `auto` or `auto:K,K,...`; ValueError otherwise."""
        value = text.strip().lower()
        if re.fullmatch(r"[0-9]{1,3}", value):
            width = int(value)
            if width > MAX_WIDTH:
                raise ValueError(text)
            return cls("static", (width,)) if width else STOCK
        if value == "":
            return STOCK
        if value == "auto":
            return cls("auto")
        listed = re.fullmatch(r"auto:\s*([0-9]{1,3}(?:\s*,\s*[0-9]{1,3})*)", value)
        if not listed:
            raise ValueError(text)
        widths = tuple(sorted({int(part) for part in listed[1].split(",")}))
        if widths[-1] > MAX_WIDTH:
            raise ValueError(text)
        return cls("auto", widths)

    def __str__(self) -> str:
        if self.mode == "auto" and self.widths:
            return "auto:" + ",".join(map(str, self.widths))
        return {"stock": "0", "auto": "auto"}.get(self.mode) or str(self.widths[0])


STOCK = VerifyTokens("stock")


def _switch(value: Any) -> Any:
    """Exactly 0 or 1: `DFLASH_BLOCK_VERIFY=off` must not mean on, nor `=2` anything."""
    if isinstance(value, str):
        if value.strip() not in ("0", "1"):
            raise ValueError(value)
        return value.strip() == "1"
    return value


def _digits(value: Any) -> Any:
    """Plain ASCII digits: int() would take `1_0`, `٣` or ` 7 ` with a newline inside."""
    if isinstance(value, str):
        if not re.fullmatch(r"[0-9]{1,9}", value.strip()):
            raise ValueError(value)
        return int(value)
    return value


def _path(value: Any) -> Any:
    if isinstance(value, str) and "\0" in value:
        raise ValueError(value)
    return value


Switch = Annotated[bool, BeforeValidator(_switch)]
Whole = Annotated[int, BeforeValidator(_digits)]
FilePath = Annotated[Path, BeforeValidator(_path)]


def _verify_tokens(value: Any) -> Any:
    return VerifyTokens.parse(value) if isinstance(value, str) else value


class Settings(BaseSettings):
    """Every variable with the prefix DFLASH_. `description` completes the sentence "... accepted: ".

    Blank means unset, since `docker run -e NAME` and compose files pass blanks.
    """

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="ignore", frozen=True, arbitrary_types_allowed=True)

    verify_tokens: Annotated[VerifyTokens, NoDecode, BeforeValidator(_verify_tokens)] = Field(
        STOCK, description="0 (stock vLLM), a width from 1 to the drafter's N, auto, or a list such as auto:1,3,7"
    )
    tokens: Whole | None = Field(
        None,
        ge=1,
        le=MAX_WIDTH,
        description=f"the draft width N, a whole number from 1 to the drafter's trained block (at most {MAX_WIDTH})",
    )
    block_verify: Switch = Field(False, description="0 (token-wise verification) or 1 (block verification)")
    verify_strict: Switch = Field(
        True, description="1 (stop when the width cannot be honoured) or 0 (warn and run stock vLLM)"
    )
    max_graphs: Whole | None = Field(
        None, ge=1, le=100_000, description="an upper bound on captured CUDA graphs, a whole number from 1"
    )
    estimator: Literal["class", "hazard"] = Field("class", description="class or hazard")
    cost_table: FilePath | None = Field(None, description="the path of a cost table written by `dflash-verify profile`")
    cache_dir: FilePath | None = Field(None, description="a directory for measured cost tables")
    control_file: FilePath | None = Field(
        None, description="the path of a small JSON file that switches the width live"
    )
    trace_file: FilePath | None = Field(None, description="a path that gets one JSON line per step")
    profile_seconds: Whole | None = Field(
        None,
        ge=0,
        le=3600,
        description="the seconds (0 to 3600) that a server without a stored cost table may spend measuring one before it serves",
    )
    # Read by the CPU engine of demo and tests (cpu/) and by start.sh; named here so that a typo is still found.
    cpu: Switch = Field(False, description="0 or 1 (the real engine on a CPU, for demo and tests)")
    venv: FilePath | None = Field(None, description="the directory of start.sh's Python environment")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what `load` passes: no hidden second look at the process environment, no .env file."""
        return (init_settings,)

    @property
    def width_active(self) -> bool:
        """Whether a width was asked for by name."""
        return self.verify_tokens.mode != "stock"

    @property
    def active(self) -> bool:
        """Whether anything of vLLM may be touched at all."""
        return self.width_active or self.block_verify


def names() -> list[str]:
    """Every known variable, with its prefix."""
    return [PREFIX + name.upper() for name in Settings.model_fields]


def load(environ: Mapping[str, str] | None = None, *, check_names: bool = False) -> Settings:
    """Settings from `environ` (default: the process environment).

    check_names: refuse unknown names also when neither a width nor block verification is asked for (commands; a server
    without either is stock vLLM and must start).

    Raises SettingsError with one sentence for a value that is not accepted, and, when a width or block verification
    is asked for, for a DFLASH_ name that does not exist. Without either, nothing is refused: stock vLLM must start.
    """
    environ = os.environ if environ is None else environ
    given = {name: value for name, value in environ.items() if name.startswith(PREFIX) and value.strip()}
    try:
        settings = Settings(**_Environment(given)())
    except ValidationError as error:
        raise SettingsError(_sentence(error, given)) from None
    if settings.active or check_names:
        _refuse_unknown(given)
    return settings


class _Environment(EnvSettingsSource):
    """pydantic-settings' own reader, over a mapping that the caller chose."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        super().__init__(Settings)

    def _load_env_vars(self) -> Mapping[str, str | None]:
        return {name.lower(): value for name, value in self._environ.items()}


def _sentence(error: ValidationError, given: Mapping[str, str]) -> str:
    field = str(error.errors()[0]["loc"][0])
    name = PREFIX + field.upper()
    accepted = Settings.model_fields[field].description
    return f"{name}={shown(given.get(name, ''))} is not accepted: set it to {accepted}, or unset it."


def shown(value: str) -> str:
    """A value as it stands in a sentence: quoted, escaped, and not for ever."""
    return repr(value if len(value) <= 60 else value[:57] + "...")


def _refuse_unknown(given: Mapping[str, str]) -> None:
    for name in sorted(given):
        if name not in names():
            raise SettingsError(
                f"{shown(name)[1:-1]} is not a variable of dflash-verify: {nearest(name)}Rename or unset it."
            )


def nearest(name: str) -> str:
    """`did you mean DFLASH_TOKENS? ` for a name that is near a known one, else the known ones."""
    known = names()
    # The prefix is common to all and says nothing about which one was meant.
    close = difflib.get_close_matches(
        name.removeprefix(PREFIX), [k.removeprefix(PREFIX) for k in known], n=1, cutoff=0.6
    )
    if close:
        return f"did you mean {PREFIX}{close[0]}? "
    return f"the nearest of its {len(known)} names is {max(known, key=lambda k: _likeness(name, k))}. "


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()
