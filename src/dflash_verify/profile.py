"""Measured step times of one server: the key they are valid for, where they are kept, and how they are measured."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

from dflash_verify.settings import Settings
from dflash_verify.width.cost import CostKey, CostTable, CostTableError

logger = logging.getLogger("vllm.plugins.dflash_verify")


def cost_key(vllm_config: Any) -> CostKey:
    """What this engine's step times depend on."""
    import vllm
    from vllm.platforms import current_platform

    speculative = vllm_config.speculative_config
    return CostKey(
        gpu=str(current_platform.get_device_name()),
        tensor_parallel_size=vllm_config.parallel_config.tensor_parallel_size,
        target_config=_config_digest(vllm_config.model_config),
        draft_config=_config_digest(speculative.draft_model_config),
        engine_version=vllm.__version__,
        dtype=str(vllm_config.model_config.dtype).removeprefix("torch."),
        capture_sizes=tuple(vllm_config.compilation_config.cudagraph_capture_sizes or ()),
    )


def _config_digest(model_config: Any) -> str:
    """12 hex digits over a model's architecture and quantisation; weights and paths do not matter."""
    raw = dict(model_config.hf_config.to_dict())
    for name in ("_name_or_path", "transformers_version", "torch_dtype", "dtype"):
        raw.pop(name, None)
    raw["quantization"] = model_config.quantization
    return hashlib.sha256(json.dumps(raw, sort_keys=True, default=str).encode()).hexdigest()[:12]


def cache_dir(settings: Settings) -> Path:
    """Where tables are kept: DFLASH_CACHE_DIR, else `dflash-verify` in the user's cache directory."""
    if settings.cache_dir is not None:
        return settings.cache_dir
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(root).expanduser() / "dflash-verify"


def table_path(key: CostKey, settings: Settings) -> Path:
    """The file of this key's table."""
    if settings.cost_table is not None:
        return settings.cost_table
    name = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
    return cache_dir(settings) / f"cost-{name}.json"


def stored_table(vllm_config: Any, settings: Settings) -> CostTable | None:
    """The table measured for this engine, or None, and then the log says that the controller learns.

    Raises CostTableError if DFLASH_COST_TABLE names a table that is not this engine's.
    """
    key = cost_key(vllm_config)
    path = table_path(key, settings)
    if settings.cost_table is None and not path.exists():
        return None
    try:
        return CostTable.load(path, key)
    except CostTableError as error:
        if settings.cost_table is not None:
            raise
        logger.warning("dflash-verify: %s The controller starts at full width and learns.", error)
        return None
