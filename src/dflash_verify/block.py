"""The switch for block verification: what `DFLASH_BLOCK_VERIFY=1` sets, says or refuses. Imports neither vLLM nor torch.

Block verification (Sun et al. 2024, arXiv 2403.10444) needs the distribution that the drafts were drawn from, and
random numbers that are new at every step. Both depend on the draft architecture and on the release, and what a release
lacks shows only in its output distribution; so what is needed is read from its source (`read_capabilities`), and
`decide` turns that and the user's own settings into settings, sentences, or a refusal.
"""

import ast
from dataclasses import dataclass
from pathlib import Path

METHODS = ("dflash", "dspark")

# Draft architectures whose speculator samples its drafts when draft_sample_method is "probabilistic" and records the
# distribution it drew from. Read in vLLM 0.28.0 to 0.33.0, v1/worker/gpu/spec_decode: DFlashSpeculator samples every
# position (plain DFlash, Laguna's, Muse Glimmer's); DFlash2Speculator and LiLiCorrSpeculator walk their candidates;
# DSparkSpeculator samples after the Markov head of every DSpark model.
SAMPLING_ARCHITECTURES = {
    "DFlashDraftModel": "dflash",
    "DFlash2DraftModel": "dflash",
    "DFlash2BeamDraftModel": "dflash",
    "LiLiCorrDraftModel": "dflash",
    "DFlashLagunaForCausalLM": "dflash",
    "DFlashMuseGlimmerAssistantModel": "dflash",
    "MuseGlimmerAssistantModel": "dflash",
    "DSparkDraftModel": "dspark",
    "DSparkV41DraftModel": "dspark",
    "Qwen3DSparkModel": "dspark",
    "Qwen3OmniDSparkModel": "dspark",
    "K3DSparkModel": "dspark",
    "MuseSparkDSparkModel": "dspark",
    "Gemma4DSparkModel": "dspark",
}
# Draft architectures that always take the most likely token: XPress refines a greedy draft (jacobi_refine_greedy) and
# leaves the recorded distribution at its initial zeros even when sampling was asked for.
GREEDY_ARCHITECTURES = {"Qwen3XPressModel": "dflash", "DFlashQwen3XPressModel": "dflash"}

# Platforms whose Model Runner V2 verifies with vLLM's own Triton kernels. ROCm calls itself cuda, too.
DEVICES = ("cuda", "rocm", "xpu", "cpu")


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What the sources of a release say about block verification. release: for the sentences, e.g. "0.33.0"."""

    release: str
    has_block_method: bool  # SpeculativeConfig accepts rejection_sample_method="block"
    draft_noise_separate: (
        bool  # drafts and the tokens resampled after them do not share noise (vLLM 54282; not in 0.28)
    )
    placeholders_guarded: bool  # -1 placeholders do not index out of bounds (vLLM 50939; guarded from 0.28 on)
    step_noise_separate: bool  # positions verified again draw new random numbers (from 0.33 on)
    architectures: frozenset[str]  # draft architectures of the model registry


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked of the switch. None: the user did not set it.

    architectures: of the draft model's config, as loaded or as vLLM renames it. device: current_platform.device_type.
    """

    method: str | None
    architectures: tuple[str, ...]
    capabilities: Capabilities
    model_runner_v2: bool
    device: str = "cuda"
    draft_sample_method: str | None = None
    rejection_sample_method: str | None = None
    use_local_argmax_reduction: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do. Fields of SpeculativeConfig to set (None: leave alone), and at most one sentence of each kind.

    refusal: the server must not start; then nothing else is set. warning: say once, and go on.
    """

    rejection_sample_method: str | None = None
    draft_sample_method: str | None = None
    start_line: str | None = None
    warning: str | None = None
    refusal: str | None = None


def _refuse(found: str, remedy: str) -> Decision:
    return Decision(refusal=f"DFLASH_BLOCK_VERIFY=1 cannot be honoured: {found}; {remedy}.")


def _refuse_release(capabilities: Capabilities) -> Decision | None:
    """Why this release cannot verify blocks losslessly, if it cannot."""
    release = f"vLLM {capabilities.release}"
    unset = "use vLLM 0.33.0 or later, or unset the variable (standard verification)"
    if not capabilities.has_block_method:
        return _refuse(f"{release} has no block verification", unset)
    if not capabilities.draft_noise_separate:
        return _refuse(
            f"{release} draws a sampled draft and the token that replaces it from the same noise, "
            "so the output is not the target's (vLLM 54282)",
            unset,
        )
    if not capabilities.placeholders_guarded:
        return _refuse(f"{release} reads out of bounds at a grammar's -1 placeholders (vLLM 50939)", unset)
    if not capabilities.step_noise_separate:
        return _refuse(
            f"{release} decides a position that is verified again with the random number that rejected it before, "
            "so the output is not the target's",
            unset,
        )
    return None


def _refuse_setting(request: Request) -> Decision | None:
    """Why this server cannot verify blocks, whatever the release."""
    if request.method not in METHODS:
        return _refuse(
            f"the speculative method is {request.method or 'none'}, and block verification is for dflash and dspark",
            "unset the variable or use such a drafter",
        )
    if not request.model_runner_v2:
        return _refuse(
            "Model Runner V1 ignores block verification", "remove VLLM_USE_V2_MODEL_RUNNER=0 or unset the variable"
        )
    if request.device not in DEVICES:
        return _refuse(
            f"the sampler of device {request.device} has no block mode (expected one of {', '.join(DEVICES)})",
            "unset the variable",
        )
    if request.rejection_sample_method not in (None, "block"):
        return _refuse(
            f'rejection_sample_method is set to "{request.rejection_sample_method}"',
            "remove it from the speculative config or unset the variable",
        )
    return None


def _sampling_architecture(request: Request) -> bool | None:
    """Whether the drafter can sample its drafts; None if no architecture of it is known for this method."""
    for known, can_sample in ((GREEDY_ARCHITECTURES, False), (SAMPLING_ARCHITECTURES, True)):
        if any(known.get(name) == request.method for name in request.architectures):
            return can_sample
    return None


def decide(request: Request) -> Decision:
    """What DFLASH_BLOCK_VERIFY=1 does on this server (see Decision); raises nothing."""
    refused = _refuse_setting(request) or _refuse_release(request.capabilities)
    if refused is not None:
        return refused
    can_sample = _sampling_architecture(request)
    names = ", ".join(request.architectures) or "no architecture"
    if can_sample is None:
        return _refuse(
            f"it is not known whether draft architecture {names} samples its drafts",
            f"expected one of {', '.join(known_architectures(request))}, or unset the variable",
        )
    probabilistic = request.draft_sample_method == "probabilistic"
    if probabilistic and not can_sample:
        return _refuse(
            f'draft_sample_method is "probabilistic", but {names} always drafts greedily and records no distribution',
            "remove draft_sample_method or unset the variable",
        )
    if probabilistic and request.use_local_argmax_reduction:
        return _refuse(
            "use_local_argmax_reduction never computes the draft distribution", "remove it or unset the variable"
        )
    if probabilistic:
        return Decision("block", None, "block verification on, drafts sampled as configured")
    if can_sample and request.draft_sample_method is None and not request.use_local_argmax_reduction:
        return Decision(
            "block",
            "probabilistic",
            'block verification on, draft_sample_method set to "probabilistic" (it was unset; vLLM\'s default is greedy, '
            "with which block verification has no effect)",
        )
    return Decision(
        "block", None, "block verification on, drafts greedy", warning=_no_effect(request, can_sample, names)
    )


def _no_effect(request: Request, can_sample: bool, names: str) -> str:
    if not can_sample:
        cause = f"{names} always drafts greedily"
    elif request.use_local_argmax_reduction:
        cause = "use_local_argmax_reduction makes the drafts greedy"
    else:
        cause = 'draft_sample_method is "greedy"'
    return (
        f"DFLASH_BLOCK_VERIFY=1 has no effect: {cause}, and a greedy draft is a point mass, for which block and "
        "token-wise verification accept the same prefixes."
    )


def known_architectures(request: Request) -> list[str]:
    """The architectures this release registers for the method and the switch knows; all known ones if none is."""
    known = [
        name for name, method in {**SAMPLING_ARCHITECTURES, **GREEDY_ARCHITECTURES}.items() if method == request.method
    ]
    registered = [name for name in known if name in request.capabilities.architectures]
    return sorted(registered or known)


_GPU = Path("v1") / "worker" / "gpu"
_KERNELS = _GPU / "spec_decode" / "rejection_sampler_utils.py"


def _tree(root: Path, relative: Path) -> ast.Module:
    try:
        return ast.parse((root / relative).read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return ast.Module(body=[], type_ignores=[])


def _function(tree: ast.Module, name: str) -> ast.AST:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node
    return ast.Module(body=[], type_ignores=[])


def _names(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _strings(tree: ast.AST) -> set[str]:
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def _guards_placeholder(kernel: ast.AST) -> bool:
    """Whether the kernel compares a draft token with 0, which every -1 placeholder fails."""
    return any(
        isinstance(node, ast.Compare)
        and any(isinstance(bound, ast.Constant) and bound.value == 0 for bound in node.comparators)
        and any(isinstance(operator, ast.Lt | ast.GtE) for operator in node.ops)
        and "draft" in ast.unparse(node.left)
        for node in ast.walk(kernel)
    )


def read_capabilities(root: Path, release: str) -> Capabilities:
    """What the vLLM package at `root` can do, from its source alone; a file that is missing counts as not able.

    The release's name does not decide anything (kits run custom builds): it only appears in sentences.
    """
    kernels = _tree(root, _KERNELS)
    gumbel = _tree(root, _GPU / "sample" / "gumbel.py")
    config = _tree(root, Path("config") / "speculative.py")
    registry = _tree(root, Path("model_executor") / "models" / "registry.py")
    methods = next(
        (
            _strings(node.value)
            for node in config.body
            if isinstance(node, ast.Assign)
            and any(isinstance(target, ast.Name) and target.id == "RejectionSampleMethod" for target in node.targets)
        ),
        set(),
    )
    return Capabilities(
        release=release,
        has_block_method="block" in methods,
        draft_noise_separate="_DRAFT_NOISE_SALT" in _names(gumbel),
        placeholders_guarded=all(
            _guards_placeholder(_function(kernels, kernel))
            for kernel in (
                "_compute_cumulative_log_p_kernel",
                "_compute_local_residual_mass_kernel",
                "_rejection_kernel",
                "_resample_kernel",
            )
        ),
        step_noise_separate="spec_step_seed" in _names(_function(kernels, "_rejection_kernel"))
        and "spec_step_seed" in _names(_function(gumbel, "gumbel_block_argmax")),
        architectures=frozenset(_strings(registry) & (set(SAMPLING_ARCHITECTURES) | set(GREEDY_ARCHITECTURES))),
    )
