"""Cost models and acceptance profiles to replay: what is published about them, and workloads that move.

Cost models: two DGX Sparks with a BF16 or a quantised dense part (step time linear in distinct experts), one H200 with an
8B dense and a 30B-A3B mixture-of-experts shape (measured; the second is a staircase, and flatter than a trained one, see
docs/results.md), and an artificial padding jump.
Acceptance is drawn independently per verification from survival curves; profiles that move switch or drift between them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dflash_verify.simulate.trace import Request, Trace
from dflash_verify.width.cost import CostTable

Array = npt.NDArray[np.float64]
DRAFT_WIDTH = 7
WIDTHS = (1, 2, 3, 4, 5, 7)

# P(the first i drafts are all accepted). Published: structured, prose (GLM-5.3-Flash README), chat (RTX 5090 DFlash; the
# last two continued), code (per-position rates of an NVFP4 kit); the others are shapes that estimators get wrong.
SURVIVAL = {
    "structured": (0.98, 0.98, 0.94, 0.94, 0.91, 0.83, 0.83),
    "prose": (0.75, 0.58, 0.41, 0.28, 0.16, 0.09, 0.06),
    "chat": (0.73, 0.46, 0.25, 0.14, 0.07, 0.035, 0.017),
    "hard": (0.50, 0.25, 0.12, 0.06, 0.03, 0.02, 0.01),
    "code": (0.93, 0.828, 0.695, 0.563, 0.445, 0.262, 0.247),
    "copy": (1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0),
    "list": (0.85, 0.80, 0.76, 0.72, 0.68, 0.65, 0.62),
    "cliff3": (0.95, 0.92, 0.90, 0.10, 0.05, 0.02, 0.01),
    "bimodal": (0.50, 0.49, 0.48, 0.47, 0.46, 0.45, 0.44),
}


def _experts(base_ms: float, per_expert_ms: float) -> Callable[[int, int], float]:
    """Step time of a mixture of experts bound by reading weights: 288 experts, 8 per row."""

    def step_ms(batch: int, width: int) -> float:
        rows = batch * (width + 1)
        distinct = 288.0 * (1.0 - (1.0 - 8.0 / 288.0) ** rows)
        return base_ms + per_expert_ms * distinct

    return step_ms


def _padding_jump(batch: int, width: int) -> float:
    step_ms = 20.0 + 0.25 * batch * (width + 1)
    return step_ms * 1.45 if batch >= 4 and width >= 4 else step_ms


def _table(step_ms: Callable[[int, int], float], batches: tuple[int, ...]) -> CostTable:
    cells = {batch: tuple(round(step_ms(batch, width), 3) for width in WIDTHS) for batch in batches}
    return CostTable(DRAFT_WIDTH, WIDTHS, cells)


COSTS = {
    "spark": _table(_experts(75.5, 0.773), (1, 2, 3, 4, 6, 8, 16)),
    "spark-quantised": _table(_experts(18.0, 1.04), (1, 2, 3, 4, 6, 8, 16)),
    # Measured on one H200; vLLM 0.33.0, random weights.
    "h200-dense": CostTable(
        DRAFT_WIDTH,
        (1, 3, 5, 7),
        {
            1: (7.5, 8.16, 8.22, 8.59),
            32: (9.67, 11.43, 14.44, 14.32),
            128: (21.77, 29.4, 40.98, 44.06),
            256: (38.29, 56.22, 73.99, 85.57),
        },
    ),
    "h200-moe": CostTable(
        DRAFT_WIDTH,
        WIDTHS,
        {
            1: (6.16, 7.02, 7.88, 7.05, 7.14, 6.89),
            4: (9.23, 9.51, 10.04, 10.63, 10.73, 10.99),
            16: (14.39, 15.66, 16.17, 19.02, 20.21, 17.04),
            32: (18.68, 20.62, 19.01, 22.53, 22.82, 21.57),
        },
    ),
    "padding-jump": _table(_padding_jump, (1, 2, 3, 4, 8, 16)),
}

# (cost model, requests at a time): each cost model at a batch it is used for, and the ends of the range.
SETTINGS = (
    ("spark", 4),
    ("spark-quantised", 4),
    ("h200-dense", 32),
    ("h200-moe", 16),
    ("padding-jump", 8),
)
EXTRA_SETTINGS = (("spark", 1), ("h200-dense", 256))


@dataclass(frozen=True)
class Profile:
    """How acceptance goes. parts: survival curves by name.

    dwell: verifications until a request moves to the next part (0: each request keeps one part, in turn). drift: parts
    blend over the request. load: 0 all requests wait from the start; else they arrive over time, at this share of what
    the full width could serve.
    """

    parts: tuple[str, ...]
    dwell: int = 0
    drift: bool = False
    guided: tuple[str, ...] = ()
    load: float = 0.0

    @property
    def moves(self) -> bool:
        return len(self.parts) > 1 or self.load > 0


PROFILES = {
    **{name: Profile((name,)) for name in SURVIVAL},
    "switch": Profile(("prose", "copy"), dwell=40),
    "switch20": Profile(("prose", "copy"), dwell=20),
    "switch-chat": Profile(("chat", "structured"), dwell=60),
    "mixed": Profile(("copy", "chat")),
    "mixed31": Profile(("chat", "chat", "chat", "structured")),
    "drift": Profile(("hard", "structured"), drift=True),
    "guided": Profile(("structured", "prose", "prose"), guided=("structured",)),
    "staggered": Profile(("prose", "code"), load=0.9),
}


def wrong_table(cost: CostTable, seed: int, error: float = 0.3) -> CostTable:
    """A table in which every width is off by `error`, up or down, at all batch sizes alike."""
    rng = np.random.default_rng(seed)
    while True:
        factors = 1.0 + error * rng.choice((-1.0, 1.0), size=len(cost.widths))
        if len(set(factors.tolist())) > 1:  # all alike would be a right table
            break
    cells = {b: tuple(ms * f for ms, f in zip(row, factors.tolist(), strict=True)) for b, row in cost.cells.items()}
    return CostTable(cost.draft_width, cost.widths, cells)


def _draw(rng: np.random.Generator, survival: Array) -> npt.NDArray[np.intp]:
    """Accepted drafts from survival curves [n, N]."""
    accepted: npt.NDArray[np.intp] = (rng.random(len(survival))[:, None] < survival).sum(axis=1)
    return accepted


def _accepts(rng: np.random.Generator, profile: Profile, part: str, count: int) -> npt.NDArray[np.intp]:
    curves = np.array([SURVIVAL[name] for name in profile.parts])
    if profile.drift:
        # A request is verified far fewer times than it has tokens: reach the last part within a third of the list.
        blend = np.minimum(1.0, 3.0 * np.arange(count) / count)[:, None]
        return _draw(rng, (1.0 - blend) * curves[0] + blend * curves[-1])
    if profile.dwell:
        which = np.empty(count, dtype=np.intp)
        at, now = 0, int(rng.integers(len(profile.parts)))
        while at < count:
            stay = 1 + int(rng.geometric(1.0 / profile.dwell))
            which[at : at + stay] = now
            at, now = at + stay, (now + 1) % len(profile.parts)
        return _draw(rng, curves[which])
    return _draw(rng, np.broadcast_to(np.array(SURVIVAL[part]), (count, DRAFT_WIDTH)))


def trace(profile_name: str, max_num_seqs: int, *, steps: int, seed: int, cost: CostTable | None = None) -> Trace:
    """A workload of at least `steps` steps at full batch and width.

    Requests want 200 to 1200 tokens each; lists last for any width, 0 included. cost: needed by profiles whose requests
    arrive over time, to say how fast.
    """
    profile = PROFILES[profile_name]
    if profile.load and cost is None:
        raise ValueError(f"profile {profile_name!r} has arrivals over time; expected a cost table to set their rate")
    rng = np.random.default_rng(seed)
    curves = np.array([SURVIVAL[name] for name in profile.parts])
    fastest = 1.0 + float(curves.sum(axis=1).max()) if profile.drift or profile.dwell else 0.0
    step_ms = cost.step_ms(max_num_seqs, DRAFT_WIDTH) if cost is not None else 0.0
    wanted = steps * max_num_seqs
    requests: list[Request] = []
    verifications = clock_ms = 0.0
    while verifications < wanted or len(requests) < max_num_seqs:
        part = profile.parts[len(requests) % len(profile.parts)]
        tokens = int(rng.integers(200, 1201))
        own = tokens / (fastest or 1.0 + sum(SURVIVAL[part]))
        accepts = _accepts(rng, profile, part, tokens)
        requests.append(Request(f"r{len(requests)}", clock_ms, tokens, part in profile.guided, accepts))
        verifications += own
        if profile.load:
            clock_ms += step_ms * own / max_num_seqs / profile.load
    return Trace(DRAFT_WIDTH, max_num_seqs, requests)
