"""Triton's interpreter, completed and made fast enough for a serving engine. No kernel is changed.

Idempotent; for a process that runs Triton kernels on a CPU and nothing else.
"""

import dataclasses
import sys
import warnings
from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np


def install() -> None:
    """Apply all fixes to the `triton` of this process."""
    from triton.runtime import interpreter

    if getattr(interpreter, "_dflash_verify_installed", False):
        return
    interpreter._dflash_verify_installed = True
    _interpret_what_was_decorated_before()
    _add_libdevice_functions()
    _drop_overflow_checks()
    _remember_dtypes()
    _patch_language_once()
    # numpy speaks where a device is silent: -inf - -inf in lanes that a later mask drops.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"triton\.runtime\.interpreter")


def _interpret_what_was_decorated_before() -> None:
    """Triton's own library (`tl.max`, `tl.cdiv`, ...) is decorated when Triton is imported.

    torch may import it before the platform hook has set TRITON_INTERPRET (a Python process started with only
    `DFLASH_CPU=1`); its functions are then compiled ones, which an interpreted kernel cannot call.
    """
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    interpreted: dict[Any, Any] = {}  # by the plain function: hashing a JITFunction analyses what it calls

    def interpret(function: Any) -> Any:
        return interpreted.setdefault(function.fn, InterpretedFunction(function.fn))

    for name, module in list(sys.modules.items()):
        if name == "triton" or name.startswith("triton.language"):
            for attribute, value in list(vars(module).items()):
                if isinstance(value, JITFunction):
                    setattr(module, attribute, interpret(value))
    for value in list(vars(tl.tensor).values()):
        if isinstance(value, JITFunction):  # x.sum(...) is the decorated function itself
            tl.core._tensor_member_fn(interpret(value))


def _add_libdevice_functions() -> None:
    """libdevice functions have empty bodies, for the compiler to fill; interpreted they return None.

    Needed: `log1p` by the block rejection sampler's residual, `isnan` by VLLM_COMPUTE_NANS_IN_LOGITS.
    """
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.runtime import interpreter

    def elementwise(function: Callable[..., Any], result_type: Any = None) -> Callable[[Any], Any]:
        def call(x: Any) -> Any:
            x = interpreter.interpreter_semantic.to_tensor(x)
            scalar = result_type or x.dtype
            with np.errstate(all="ignore"):  # as on a device: log1p(-1) is -inf, without a word
                data = function(x.handle.data).astype(interpreter._get_np_dtype(scalar))
            shape = x.type.with_element_ty(scalar) if x.type.is_block() else scalar
            return tl.core.tensor(interpreter.TensorHandle(data, scalar), shape)

        return call

    libdevice.log1p = elementwise(np.log1p)
    libdevice.isnan = elementwise(np.isnan, tl.int32)


def _drop_overflow_checks() -> None:
    """Speed only: integer overflow checks are a debug build's business on a GPU and a third of the time here."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _remember_dtypes() -> None:
    """Speed only: the interpreter builds its table of 17 types anew whenever it asks for one, a tenth of its time."""
    import triton.language as tl
    from triton.runtime import interpreter

    original = interpreter._get_np_dtype
    known: dict[Any, Any] = {}

    def get_np_dtype(tt_dtype: Any) -> Any:
        if type(tt_dtype) is not tl.dtype:  # pointers and blocks
            return original(tt_dtype)
        if tt_dtype not in known:
            known[tt_dtype] = original(tt_dtype)
        return known[tt_dtype]

    interpreter._get_np_dtype = get_np_dtype


def _patch_language_once() -> None:
    """Speed only: the interpreter replaces every builtin of `triton.language` at each launch and at each call of a
    device function, and puts the originals back after a launch. Nothing is compiled here, so once is enough."""
    import triton.language as tl
    from triton.runtime import interpreter

    class NothingToRestore:
        def restore(self) -> None:
            pass

    sees_the_language = FunctionType((lambda: None).__code__, {"tl": tl, "core": tl.core})
    interpreter._patch_lang(sees_the_language)
    scope = NothingToRestore()
    interpreter._patch_lang = lambda fn: scope
