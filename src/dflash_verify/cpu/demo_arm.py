"""One arm of the demo, in a process of its own: `python -m dflash_verify.cpu.demo_arm MODELS DRAFTER`.

The width comes from the environment alone, as for a server: vLLM loads the installed plugin, which reads
DFLASH_VERIFY_TOKENS. The result is one JSON object, the last line of standard output.
"""

import json
import sys
from pathlib import Path
from typing import Any

from dflash_verify.cpu import environment, trace
from dflash_verify.cpu.models import Models

PROMPTS = ("Hello world", "Once upon a time there was")
MAX_TOKENS = 64


def run(models: Models, drafter: Any) -> dict[str, Any]:
    """Greedy tokens of both prompts, and what vLLM scheduled and counted on the way."""
    environment.activate()
    from vllm import LLM

    from dflash_verify.cpu.engine import ENGINE_ARGS, Engine, speculative_config

    speculation = {"speculative_config": speculative_config(models, drafter)} if drafter else {}
    # Not open_engine: that one applies the plugin itself, and here vLLM has to find it.
    engine = Engine(LLM(model=str(models.target), **ENGINE_ARGS, **speculation))
    tokens = engine.generate(PROMPTS, MAX_TOKENS)
    scheduled = trace.draft_counts(engine.steps)
    counters = engine.counters()
    engine.close()
    return {
        "tokens": tokens,
        "steps": len(engine.steps),
        "mean_width": sum(scheduled) / len(scheduled),
        "acceptance_length": counters.acceptance_length if counters.drafts else None,
    }


if __name__ == "__main__":
    _, folder, name = sys.argv
    print(json.dumps(run(Models(Path(folder)), None if name == "none" else name)), flush=True)
