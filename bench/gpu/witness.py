"""vLLM's worker extension for these benchmarks: methods that `LLM.collective_rpc` calls in each worker process."""

import itertools
import os
import time
from collections import Counter
from typing import Any

import torch

if os.environ.get("BENCH_STOCK_ROWS") == "1":
    # This module is imported before any graph is captured: overlay gdn-active-width then narrows nothing.
    from dflash_verify.overlays import gdn_active_width

    gdn_active_width.active_columns = lambda *args: None


def _spread_experts() -> None:
    """Let a mixture of experts of random weights read about as many experts as one that was trained.

    A drafter of vLLM's dummy weights proposes one token, everywhere: a step at K = 7 then reads no more experts than one at
    K = 1. Here drafts are random tokens; vLLM's synthetic acceptance does not look at them. The dummy weights are also the
    same in all tensors of a shape, so that all layers' routers agree; here each tensor has values of its own. Both
    the same on every rank.
    """
    from vllm.model_executor.model_loader import dummy_loader
    from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

    fill, propose = dummy_loader.initialize_single_dummy_weight, DFlashSpeculator.propose
    seeds = itertools.count(1234)
    generators: dict[torch.device, torch.Generator] = {}

    def filled(*args: Any, **kwargs: Any) -> None:
        fill(*args, **{"seed": next(seeds)} | kwargs)

    def proposed(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        drafts: torch.Tensor = propose(self, *args, **kwargs)
        if drafts.device not in generators:
            generators[drafts.device] = torch.Generator(drafts.device).manual_seed(0)
        return drafts.random_(0, self.vocab_size, generator=generators[drafts.device])

    dummy_loader.initialize_single_dummy_weight = filled
    DFlashSpeculator.propose = proposed


_spread_experts()


class Witness:
    """Sets the synthetic acceptance, counts the drafter's graphs, and keeps what this rank was told and sampled."""

    model_runner: Any

    def set_survival(self, rates: list[float]) -> None:
        from vllm.v1.spec_decode.utils import unconditional_to_conditional_rates

        target = self.model_runner.rejection_sampler.synthetic_conditional_rates
        target.copy_(torch.tensor(unconditional_to_conditional_rates(rates), dtype=target.dtype))

    def watch_draft_graphs(self) -> None:
        manager = self.model_runner.speculator.query_cudagraph_manager
        dispatch = manager.dispatch
        self._draft_graphs: Counter[str] = Counter()

        def counted(*args: Any, **kwargs: Any) -> Any:
            desc = dispatch(*args, **kwargs)
            self._draft_graphs[desc.cg_mode.name] += 1
            return desc

        manager.dispatch = counted

    def draft_graphs(self) -> dict[str, int]:
        return dict(self._draft_graphs)

    def watch_times(self) -> None:
        execute = self.model_runner.execute_model
        self._times: list[tuple[float, int, bool, int]] = []

        def timed(output: Any, *args: Any, **kwargs: Any) -> Any:
            if counts := output.num_scheduled_tokens:
                drafts = output.scheduled_spec_decode_tokens
                # More than one token and no drafts: a prompt.
                prompts = any(n > 1 and r not in drafts for r, n in counts.items())
                verified = sum(map(len, drafts.values()))
                self._times.append((time.perf_counter(), len(counts), prompts, verified))
            return execute(output, *args, **kwargs)

        self.model_runner.execute_model = timed

    def times(self) -> list[tuple[float, int, bool, int]]:
        """(when it was launched in s, requests, whether it has prompts, drafts verified) of every step since the last call."""
        times, self._times = self._times, []
        return times

    def watch_steps(self) -> int:
        """Returns this worker's process id."""
        runner = self.model_runner
        execute, sample = runner.execute_model, runner.sample_tokens
        self._widths: list[int] = []
        self._checksum = torch.zeros(1, dtype=torch.int64, device=runner.device)

        def watched_execute(output: Any, *args: Any, **kwargs: Any) -> Any:
            if output.total_num_scheduled_tokens:
                self._widths.append(output.num_spec_tokens_to_schedule)
            return execute(output, *args, **kwargs)

        def watched_sample(*args: Any, **kwargs: Any) -> Any:
            result = sample(*args, **kwargs)
            tokens = runner.req_states.last_sampled_tokens
            place = torch.arange(1, tokens.numel() + 1, device=tokens.device)
            # No synchronisation: the sum stays on the device until it is asked for.
            self._checksum.mul_(1000003).add_((tokens.flatten().long() * place).sum())
            return result

        runner.execute_model, runner.sample_tokens = watched_execute, watched_sample
        return os.getpid()

    def steps(self) -> tuple[list[int], int]:
        """Widths that this rank was told, and a checksum over the last token of each request in each step."""
        return self._widths, int(self._checksum.item())
