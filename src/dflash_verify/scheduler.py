"""WidthScheduler: where the width controller and vLLM's scheduler meet.

vLLM's scheduler reads `dynamic_sd_lookup[batch]` once per non-empty step and publishes the value with that step, for the
drafts of the next one; it tells per request how many drafts were accepted. Both are overridden here, for the
asynchronous and the synchronous scheduler, the same code for 0.28 to 0.33. Everything else is vLLM's.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from dflash_verify.metrics import WidthStats, attach
from dflash_verify.settings import Settings, load
from dflash_verify.steering import Steering, Step
from dflash_verify.width.controller import WidthController

logger = init_logger("vllm.plugins.dflash_verify")

IN_FLIGHT = 64  # steps between schedule and update; vLLM keeps 2 (pipeline parallelism is refused)


def width_scheduler(*args: Any, **kwargs: Any) -> Scheduler:
    """The WidthScheduler that fits the final configuration; `--scheduler-cls` names this factory because the flag is
    read before vLLM has decided between asynchronous and synchronous scheduling."""
    config = kwargs["vllm_config"].scheduler_config
    scheduler = AsyncWidthScheduler if config.async_scheduling else SyncWidthScheduler
    return scheduler(*args, **kwargs)


class _Lookup:
    """Stands in for vLLM's list from batch size to width."""

    def __init__(self, scheduler: WidthMixin) -> None:
        self._scheduler = scheduler

    def __getitem__(self, batch: int) -> int:
        return self._scheduler.next_width()


class WidthMixin:
    """The overrides; combined with vLLM's two schedulers below."""

    running: list[Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = load()
        self.steering = make_steering(kwargs["vllm_config"], settings)
        self.dynamic_sd_lookup = _Lookup(self)
        # Not keyed by id(): an output that never comes back must not meet a later one at the same address.
        self._steps: deque[tuple[Any, Step]] = deque(maxlen=IN_FLIGHT)
        self._step: Step | None = None
        self._width_stats: WidthStats | None = None

    def next_width(self) -> int:
        """Width of the next step, for the requests that run now."""
        return self.steering.decide([request.request_id for request in self.running])

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        width, now_s = self.steering.published, self.steering.clock()
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        if output.total_num_scheduled_tokens:
            step = self._step_of(output, width, now_s)
            self.steering.scheduled(step)
            self._steps.append((output, step))
        return output

    def _step_of(self, output: Any, width: int, now_s: float) -> Step:
        batch = len(output.num_scheduled_tokens)
        drafts = output.scheduled_spec_decode_tokens
        uniform = output.total_num_scheduled_tokens == batch * (width + 1)
        if width:
            uniform = uniform and len(drafts) == batch and set(map(len, drafts.values())) == {width}
        else:
            # One token each: a decode, unless it is the last token of a prompt.
            requests: dict[str, Any] = self.requests  # type: ignore[attr-defined]
            uniform = uniform and not drafts and all(requests[r].num_output_tokens for r in output.num_scheduled_tokens)
        # From 0.33 on a step none of whose requests will need drafts makes none: it gives each its last token.
        next_width = 0 if getattr(output, "skip_drafts", False) else self.steering.published
        step = Step(width, now_s, batch, uniform, len(drafts), next_width=next_width)
        if uniform and not width:
            step.ids = list(output.num_scheduled_tokens)  # nothing will be observed of them but that time passed
        return step

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any, *args: Any, **kwargs: Any) -> Any:
        step = self._step = self._pop(scheduler_output)
        if step is None:
            return super().update_from_output(scheduler_output, model_runner_output, *args, **kwargs)  # type: ignore[misc]
        self.steering.arrived(step, self._steps[0][1] if self._steps else None)
        if step.decodes or (step.uniform and step.width == 0):
            self._width_stats = WidthStats.of_step(
                map(len, scheduler_output.scheduled_spec_decode_tokens.values()),
                step.width,
                policy_active=self.steering.policy_active,
                step_ms=step.step_ms,
                reason=self.steering.reason if self.log_stats and self.steering.explains else "",  # type: ignore[attr-defined]
            )
        result = super().update_from_output(scheduler_output, model_runner_output, *args, **kwargs)  # type: ignore[misc]
        self._step = None
        self.steering.finished(step, busy=bool(self.running))
        return result

    def _pop(self, output: Any) -> Step | None:
        """The step of this output; those before it, which never came back, go with it. An empty output was no step, and
        may come back when later ones are already in flight."""
        for position, (scheduled, step) in enumerate(self._steps):
            if scheduled is output:
                for _ in range(position + 1):
                    self._steps.popleft()
                return step
        return None

    def make_spec_decoding_stats(
        self,
        spec_decoding_stats: Any,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: dict[str, int] | None,
        request_id: str,
    ) -> Any:
        if self._step is not None and num_draft_tokens:
            # What a grammar ruled out was never offered to the target: seen as fewer drafts, not as a rejection.
            invalid = num_invalid_spec_tokens.get(request_id, 0) if num_invalid_spec_tokens else 0
            self._step.observe(request_id, num_accepted_tokens, num_draft_tokens - invalid)
        return super().make_spec_decoding_stats(  # type: ignore[misc]
            spec_decoding_stats,
            num_draft_tokens=num_draft_tokens,
            num_accepted_tokens=num_accepted_tokens,
            num_invalid_spec_tokens=num_invalid_spec_tokens,
            request_id=request_id,
        )

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        stats = super().make_stats(*args, **kwargs)  # type: ignore[misc]
        if stats is not None and self._width_stats is not None:
            attach(stats, self._width_stats)
        self._width_stats = None
        return stats

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        # Synchronous scheduling before 0.32: the runner hands over all N drafts whatever width was published.
        width = self.steering.published
        draft_token_ids.draft_token_ids = [drafts[:width] for drafts in draft_token_ids.draft_token_ids]
        super().update_draft_token_ids(draft_token_ids)  # type: ignore[misc]

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self.steering.ended(request.request_id)
        return super()._free_request(request, *args, **kwargs)  # type: ignore[misc]

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self.steering.ended(request.request_id)
        return super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]


class AsyncWidthScheduler(WidthMixin, AsyncScheduler):
    """vLLM's asynchronous scheduler with a width per step."""


class SyncWidthScheduler(WidthMixin, Scheduler):
    """vLLM's synchronous scheduler with a width per step."""


def make_steering(vllm_config: Any, settings: Settings) -> Steering:
    """The steering of one engine, from its final configuration."""
    speculative = vllm_config.speculative_config
    draft_width = speculative.num_speculative_tokens
    widths = tuple(sorted({entry[2] for entry in speculative.num_speculative_tokens_per_batch_size}))

    def make_controller() -> WidthController:
        from dflash_verify.profile import stored_table

        table = stored_table(vllm_config, settings)
        return WidthController(widths, draft_width, table, estimator=settings.estimator)

    return Steering(
        settings.verify_tokens,
        draft_width,
        widths,
        make_controller,
        control_file=settings.control_file,
        trace_file=settings.trace_file,
        log=logger,
    )
