"""Overlay guided-residual: a sampled draft that the grammar forbids is rejected as what it is, a draft of probability 0."""

from typing import Any

from dflash_verify.overlays.attach import AnyFunction, Context


def keep_first_forbidden(logits: Any, token_ids: Any, invalid: Any, drawn: Any) -> Any:
    """The mask of drafts to replace by -1, without the first one of each request; that one's logit becomes -inf.

    logits: [num_logits, V], changed in place; row i - 1 verifies the draft in row i. token_ids: [num_logits], input id of
    each row. invalid: bool [num_logits], from the first forbidden draft of a request to its last draft. drawn: bool
    [num_logits], False for ids that no drafter drew. No synchronisation with the host.

    The grammar has already set the logit of a draft that it forbids to -inf. It is set here too because vLLM also marks
    drafts whose hand-off to the scheduler was lost, and the rows after such a one are not constrained (vLLM 54437).
    """
    import torch

    first = invalid.clone()
    first[1:] &= ~invalid[:-1]  # a request's own row 0 is never invalid, so runs do not join
    first &= drawn
    rows = torch.arange(logits.shape[0] - 1, device=logits.device)
    ids = token_ids[1:].long().clamp(min=0)
    logits[rows, ids] = logits[rows, ids].masked_fill(first[1:], float("-inf"))
    return invalid & ~first


def _with_residual(original: AnyFunction, context: Context) -> AnyFunction:
    def __call__(self: Any, logits: Any, input_batch: Any, draft_logits: Any = None, invalid_drafts: Any = None) -> Any:
        if invalid_drafts is not None and draft_logits is not None:
            indices = input_batch.logits_indices
            position = input_batch.positions[indices]
            prefill = self.sampler.req_states.prefill_len.gpu[input_batch.expanded_idx_mapping.long()]
            drawn = position - input_batch.expanded_local_pos >= prefill
            invalid_drafts = keep_first_forbidden(logits, input_batch.input_ids[indices], invalid_drafts, drawn)
        return original(self, logits, input_batch, draft_logits, invalid_drafts)

    return __call__


WRAPPERS = {"RejectionSampler.__call__": _with_residual}
