"""What is asked of the server: presets from workloads.toml and prompt files."""

import hashlib
import json
import tomllib
import zlib
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from dflash_verify.bench.errors import BenchError


class Workload(BaseModel):
    """Prompts and sampling of one kind of text. Frozen; written into the manifest of every run directory."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    about: str = ""
    prompts: tuple[str, ...] = Field(min_length=1)
    max_tokens: int = Field(gt=0)
    temperature: float = Field(ge=0)
    top_p: float = Field(gt=0, le=1)
    repeats: int = Field(gt=0)
    must_reach_length: bool = False
    mix: bool = False
    # JSON text, not a table: TOML cannot write null and order matters to grammars.
    json_schema: str | None = Field(default=None, alias="schema")

    @property
    def schema_object(self) -> dict[str, Any] | None:
        return None if self.json_schema is None else json.loads(self.json_schema)

    @property
    def deterministic(self) -> bool:
        """At temperature 0 every arm should write the same text."""
        return self.temperature == 0

    @property
    def prompts_per_repeat(self) -> int:
        return 1 if self.mix else len(self.prompts)

    def prompt_index(self, prompt: int, repeat: int, stream: int) -> int:
        """Which prompt one stream of a run asks."""
        return (repeat + stream) % len(self.prompts) if self.mix else prompt

    def body(self, prompt: int, seed: int) -> dict[str, Any]:
        """The chat request, without model name and cache salt."""
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": self.prompts[prompt]}],
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": seed,
            "stream": True,
            # vLLM: usage in every chunk, so that tokens are counted by the server and not by chunks.
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            # Thinking text has another acceptance than answers (FIELD: -8 %); templates without the switch ignore it.
            "chat_template_kwargs": {"enable_thinking": False},
        }
        if self.json_schema is not None:
            body["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": self.name, "schema": self.schema_object, "strict": True},
            }
        return body


def text_sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def body_sha256(body: dict[str, Any]) -> str:
    """What was asked, so that two arms can be shown to have been asked the same."""
    return text_sha256(json.dumps(body, sort_keys=True))


def stream_seed(base: int, workload: str, pass_index: int, prompt: int, repeat: int, stream: int) -> int:
    """The request's sampling seed: the same in every arm, another for every repeat, pass and stream."""
    return zlib.crc32(f"{base}/{workload}/{pass_index}/{prompt}/{repeat}/{stream}".encode())


def presets() -> dict[str, Workload]:
    tables = tomllib.loads(files("dflash_verify.bench").joinpath("workloads.toml").read_text())
    return {name: Workload.model_validate({"name": name, **table}) for name, table in tables.items()}


def choose(names: tuple[str, ...], prompts_file: Path | None, **override: Any) -> tuple[Workload, ...]:
    """The named presets, and one workload `prompts` from a file: one prompt a line, or JSON lines with "prompt".

    override: max_tokens, repeats, temperature, must_reach_length; None leaves the preset's value.
    """
    known = presets()
    chosen = []
    for name in names:
        if name not in known:
            raise BenchError(f"There is no workload {name!r}; there are {', '.join(known)}, and --prompts FILE.")
        chosen.append(known[name])
    if prompts_file is not None:
        chosen.append(_from_file(prompts_file))
    change = {key: value for key, value in override.items() if value is not None}
    return tuple(Workload.model_validate({**w.model_dump(by_alias=True), **change}) for w in chosen)


def _from_file(path: Path) -> Workload:
    prompts = []
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BenchError(f"{path} is not UTF-8 (byte {error.start}); save it as UTF-8.") from None
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        if path.suffix == ".jsonl":
            try:
                prompts.append(str(json.loads(line)["prompt"]))
            except (ValueError, KeyError, TypeError) as error:
                raise BenchError(f'{path}:{number} is not a JSON object with "prompt": {error}.') from error
        else:
            prompts.append(line)
    if not prompts:
        raise BenchError(f"{path} has no prompt; write one a line, or JSON lines with a key prompt in a .jsonl file.")
    return Workload(
        name="prompts",
        about=f"{len(prompts)} prompts from {path.name}",
        prompts=tuple(prompts),
        max_tokens=400,
        temperature=0.0,
        top_p=1.0,
        repeats=3,
    )
