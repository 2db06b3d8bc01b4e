"""The CPU engine itself: it computes what transformers computes, starts from one variable, and stays out of installs."""

import subprocess
import sys
from collections import Counter
from importlib.metadata import distribution

import pytest
import torch

from dflash_verify.cpu import PLUGIN_PATH
from dflash_verify.cpu.engine import open_engine
from dflash_verify.cpu.environment import child_environment, missing_settings
from dflash_verify.cpu.models import Drafter, Models
from dflash_verify.cpu.trace import RequestStep, Step, draft_counts, shortened

PROMPTS = ("Hello world", "it is said that the old house on the hill had more rooms than anyone had counted")
TOKENS = 24


def test_greedy_text_is_that_of_transformers(models: Models) -> None:
    """The ground on which all tests of equality stand: attention, rotation, norms and sampling are right."""
    from transformers import Qwen3ForCausalLM

    with open_engine(models) as engine:
        tokens = engine.generate(PROMPTS, TOKENS)
    target = Qwen3ForCausalLM.from_pretrained(models.target, dtype=torch.float32).eval()
    for prompt, found in zip(PROMPTS, tokens, strict=True):
        ids = list(prompt.encode())
        with torch.no_grad():
            for _ in range(TOKENS):
                ids.append(int(target(torch.tensor([ids])).logits[0, -1].argmax()))
        assert found == ids[len(prompt) :]


@pytest.mark.parametrize("drafter", ["dflash2", "dspark", "dflash"])
def test_every_generated_drafter_drafts_its_whole_block_and_is_sometimes_right(
    models: Models, drafter: Drafter
) -> None:
    with open_engine(models) as engine:
        plain = engine.generate(PROMPTS, TOKENS)
    with open_engine(models, drafter) as engine:
        assert engine.generate(PROMPTS, TOKENS) == plain
        assert set(draft_counts(engine.steps)) == {7}
        assert engine.counters().accepted_tokens > 0


def test_a_process_started_with_only_dflash_cpu_runs_the_engine(models: Models) -> None:
    """No variable of environment.py is exported: the platform hook has to be in time, or to repair what it is not."""
    program = f"""
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    llm = LLM(model={str(models.target)!r}, dtype="float32", enforce_eager=True, max_model_len=64, max_num_seqs=2,
              kv_cache_memory_bytes=1 << 22, seed=0)
    output = llm.generate(["Hello world"], SamplingParams(max_tokens=4, seed=1), use_tqdm=False)
    print(len(output[0].outputs[0].token_ids))
"""
    bare = {name: value for name, value in child_environment().items() if name not in missing_settings({})}
    bare |= {"DFLASH_CPU": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=bare, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "4"


def test_vllms_cpu_target_is_refused_with_the_remedy() -> None:
    with pytest.raises(RuntimeError, match="unset it"):
        missing_settings({"VLLM_TARGET_DEVICE": "cpu"})


def test_the_platform_is_no_entry_point_of_the_distribution() -> None:
    """vLLM logs every installed platform plugin at INFO, used or not."""
    groups = {entry_point.group for entry_point in distribution("dflash-verify").entry_points}
    assert groups <= {"console_scripts", "vllm.general_plugins"}
    assert (PLUGIN_PATH / "dflash_verify_cpu-0.1.0.dist-info" / "entry_points.txt").is_file()


def row(request: str, drafts: int, prefill: bool = False, room: int = 100) -> RequestStep:
    return RequestStep(request, drafts + 1, drafts, 0, 1, prefill, False, room)


def test_a_shortened_request_gets_its_reason_and_an_unknown_one_is_not_passed_over() -> None:
    steps = [
        Step((row("a", 0, prefill=True), row("b", 3))),
        Step((row("a", 0), row("b", 3, room=5))),
        Step((row("a", 3), row("b", 1, room=2))),
        Step((row("b", 0, room=1),)),
        Step((row("a", 0),)),
        Step((row("a", 2),)),
        Step((row("a", 7),)),
    ]
    assert shortened(steps, 3) == Counter(
        {"first after prefill": 1, "end of context": 2, "not in the step before": 1, "unexplained": 2}
    )
