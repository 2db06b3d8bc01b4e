"""Reference verification of draft blocks: what any lossless verifier must do, and what each one is worth.

Token-wise (Leviathan et al. 2022, arXiv 2211.17192), block (Sun et al. 2024, arXiv 2403.10444, Algorithm 2) and greedy,
in float64 on any device torch has. `verify` decides one block from given uniforms; `acceptance_pmf` and `output_pmf`
enumerate small vocabularies exactly; `transport_bound` is what no lossless verifier can exceed; `survival_from_paths`
gives the same quantities from recorded (target, draft) probabilities of any vocabulary. None of it imports vLLM, and
torch only with the first name that is asked for: the command must be able to say that it is missing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflash_verify.verify.bound import transport_bound, transport_survival
    from dflash_verify.verify.distributions import acceptance_pmf, expected_accepted, output_pmf, survival
    from dflash_verify.verify.gain import PathSurvival, survival_from_paths
    from dflash_verify.verify.reference import METHODS, InvalidProbabilities, Rule, cut, rule_of, verify

__all__ = [
    "METHODS",
    "InvalidProbabilities",
    "PathSurvival",
    "Rule",
    "acceptance_pmf",
    "cut",
    "expected_accepted",
    "output_pmf",
    "rule_of",
    "survival",
    "survival_from_paths",
    "transport_bound",
    "transport_survival",
    "verify",
]

_MODULES = {
    "bound": ("transport_bound", "transport_survival"),
    "distributions": ("acceptance_pmf", "expected_accepted", "output_pmf", "survival"),
    "gain": ("PathSurvival", "survival_from_paths"),
    "reference": ("METHODS", "InvalidProbabilities", "Rule", "cut", "rule_of", "verify"),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
