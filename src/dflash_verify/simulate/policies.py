"""What can choose the width in a replay: the controller itself, and what it is compared with."""

import math
from collections.abc import Sequence
from typing import Protocol

from dflash_verify.width.controller import WidthController
from dflash_verify.width.cost import CostTable


class Policy(Protocol):
    """`ahead`: the width decided while step s is scheduled is the width of step s + 1, as in vLLM; else of step s."""

    ahead: bool

    def decide(self, request_ids: list[str], guided: Sequence[bool], accepts: Sequence[int]) -> int:
        """A width for this batch. accepts: this step's draws, for those who may know."""

    def observe(self, request_ids: list[str], width: int, accepted: list[int], step_ms: float) -> None:
        """What a step has shown, `delay` steps later: accepted <= width."""

    def forget(self, request_ids: list[str]) -> None:
        """These requests have ended."""


class Static:
    ahead = False

    def __init__(self, width: int) -> None:
        self._width = width

    def decide(self, request_ids: list[str], guided: Sequence[bool], accepts: Sequence[int]) -> int:
        return self._width

    def observe(self, request_ids: list[str], width: int, accepted: list[int], step_ms: float) -> None:
        pass

    def forget(self, request_ids: list[str]) -> None:
        pass


class Oracle(Static):
    """Knows this step's draws: the width with most emitted tokens per millisecond of this step."""

    def __init__(self, cost: CostTable) -> None:
        super().__init__(cost.draft_width)
        self._cost = cost

    def decide(self, request_ids: list[str], guided: Sequence[bool], accepts: Sequence[int]) -> int:
        best, best_rate = self._cost.draft_width, 0.0
        for width, ms in zip(self._cost.widths, self._cost.row(len(request_ids)), strict=True):
            emitted = sum(min(a, width) + 1 for a in accepts)
            if emitted / ms > best_rate:
                best, best_rate = width, emitted / ms
        return best


class EmaMin:
    """What kits did before: per request a moving average of accepted counts, the batch at its minimum.

    A fully accepted step counts as N; the whole batch stays at N while any request is guided or young.
    """

    ahead = True
    ALPHA = 0.25
    YOUNG = 4

    def __init__(self, widths: Sequence[int], draft_width: int) -> None:
        self._widths = sorted(widths)
        self._n = draft_width
        self._ema: dict[str, tuple[float, int]] = {}

    def decide(self, request_ids: list[str], guided: Sequence[bool], accepts: Sequence[int]) -> int:
        beliefs = [self._ema.setdefault(request_id, (float(self._n), 0)) for request_id in request_ids]
        if any(guided) or any(seen < self.YOUNG for _, seen in beliefs):
            return self._n
        least = min(ema for ema, _ in beliefs)
        limit = math.ceil(least + 1.0)
        return max((w for w in self._widths if w <= limit), default=self._widths[0])

    def observe(self, request_ids: list[str], width: int, accepted: list[int], step_ms: float) -> None:
        for request_id, count in zip(request_ids, accepted, strict=True):
            if request_id in self._ema:
                ema, seen = self._ema[request_id]
                counted = self._n if count >= width else count
                self._ema[request_id] = (ema + self.ALPHA * (counted - ema), seen + 1)

    def forget(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._ema.pop(request_id, None)


class Auto:
    """The server's controller."""

    ahead = True

    def __init__(self, controller: WidthController) -> None:
        self.controller = controller

    def decide(self, request_ids: list[str], guided: Sequence[bool], accepts: Sequence[int]) -> int:
        return self.controller.decide(request_ids).width

    def observe(self, request_ids: list[str], width: int, accepted: list[int], step_ms: float) -> None:
        self.controller.observe(request_ids, width, accepted)
        self.controller.observe_step(len(request_ids), width, step_ms)

    def forget(self, request_ids: list[str]) -> None:
        self.controller.forget(request_ids)
