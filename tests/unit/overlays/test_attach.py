"""Overlays go on all or none, once, without importing vLLM, and come off without a trace.

Each test runs a small Python program of its own beside a toy package named vllm, since the real one takes long to import and
what is tested here is what happens around an import.
"""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

A = '''
from vllm.c import helper

class Manager:
    def build(self, x):
        """Docstring."""
        return ("stock", x)

    @staticmethod
    def static(x):
        return ("static", x)

    @classmethod
    def made(cls, x):
        return (cls.__name__, x)

    def later(self):
        return helper(1)
'''
B = """
class Other:
    def run(self):
        return "stock"
"""
C = """
def helper(x):
    return ("helped", x)
"""

PRELUDE = """
import importlib, sys, types
from dataclasses import dataclass
from dflash_verify import overlays
from dflash_verify.overlays.fingerprint import InstalledSource, SourceReader
from dflash_verify.overlays.manifest import Manifest, Target

@dataclass(frozen=True)
class Settings:
    width_active: bool = True
    block_verify: bool = False
    tag: str = ""

reader = SourceReader(InstalledSource.find())

def manifest(name, *targets, wrap=None, modes=("width",), digest=None, **more):
    module = types.ModuleType("dflash_verify.overlays." + name)
    def default(original, context):
        def wrapper(*args, **kwargs):
            return (context.overlay, original(*args, **kwargs))
        return wrapper
    module.WRAPPERS = {function: wrap or default for _, function in targets}
    sys.modules[module.__name__] = module
    return Manifest(
        name=name, title="t", why="w", upstream=[], remove_when="r", modes=list(modes), **more,
        targets=[
            Target(file=f, function=g, role="r", fingerprints={"0.33.0": digest or reader.fingerprint(f, g)})
            for f, g in targets
        ],
    )

def refused(error, says, *args):
    try:
        overlays.apply(*args)
    except error as caught:
        assert says in str(caught), str(caught)
        assert str(caught).count(chr(10)) == 0
        return caught
    raise AssertionError("not refused")

BUILD = ("vllm/a.py", "Manager.build")
RUN = ("vllm/b.py", "Other.run")
HELPER = ("vllm/c.py", "helper")
"""


@pytest.fixture
def python(tmp_path):
    """Runs a program with the toy vLLM importable."""
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text("")
    for name, text in {"a": A, "b": B, "c": C}.items():
        (package / f"{name}.py").write_text(text)
    sources = Path(__file__).resolve().parents[3] / "src"

    def run(program: str) -> None:
        code = (
            f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(sources)!r}]\n" + PRELUDE + textwrap.dedent(program)
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr

    return run


def test_nothing_is_imported_and_the_wrapper_comes_with_the_import(python):
    python("""
        status = overlays.apply(Settings(), [manifest("one", BUILD)])
        assert not [m for m in sys.modules if m == "vllm" or m.startswith(("vllm.", "torch"))]
        assert status.names("applied") == ("one",) and status.release == "0.33.0" and status["one"].release == "0.33.0"
        from vllm.a import Manager
        assert Manager().build(1) == ("one", ("stock", 1))
        assert Manager.build.__name__ == "build" and Manager.build.__doc__ == "Docstring."
        marker = Manager.build.__dflash_verify__
        assert marker.overlays == ("one",) and marker.target == "Manager.build in vllm/a.py"
        assert type(sys.modules["vllm.a"].__spec__.loader).__name__ == "SourceFileLoader"
        original = marker.original
        overlays.revert()
        assert Manager.__dict__["build"] is original and not overlays.marked(original)
    """)


def test_a_loaded_module_is_wrapped_at_once_and_restored_by_identity(python):
    python("""
        import vllm.a, vllm.b, vllm.c
        before = {n: dict(vars(vllm.a.Manager)) for n in "a"} | {"b": dict(vars(vllm.b.Other)), "c": dict(vars(vllm.c))}
        path = list(sys.meta_path)
        overlays.apply(Settings(), [manifest("one", BUILD, ("vllm/a.py", "Manager.static"), ("vllm/a.py", "Manager.made"), RUN)])
        assert vllm.a.Manager().build(1) == ("one", ("stock", 1))
        assert vllm.a.Manager.static(2) == ("one", ("static", 2)) == vllm.a.Manager().static(2)
        assert vllm.a.Manager.made(3) == ("one", ("Manager", 3))
        assert vllm.b.Other().run() == ("one", "stock")
        overlays.revert()
        for space, attributes in (("a", vars(vllm.a.Manager)), ("b", vars(vllm.b.Other)), ("c", vars(vllm.c))):
            assert all(attributes[k] is v for k, v in before[space].items()) and len(attributes) == len(before[space])
        assert sys.meta_path == path
    """)


def test_a_module_function_is_wrapped_under_every_name_that_copied_it(python):
    python("""
        import vllm.a, vllm.c
        stock = vllm.c.helper
        overlays.apply(Settings(), [manifest("one", HELPER)])
        assert vllm.c.helper(1) == ("one", ("helped", 1)) == vllm.a.Manager().later()
        overlays.revert()
        assert vllm.c.helper is stock is vllm.a.helper
    """)


def test_applying_again_changes_nothing(python):
    python("""
        import vllm.a
        manifests = [manifest("one", BUILD)]
        first = overlays.apply(Settings(), manifests)
        wrapper, path = vllm.a.Manager.build, list(sys.meta_path)
        assert overlays.apply(Settings(), manifests) is first
        assert vllm.a.Manager.build is wrapper and sys.meta_path == path
        refused(overlays.OverlayError, "other settings", Settings(tag="x"), manifests)
        assert vllm.a.Manager.build is wrapper
        overlays.revert(); overlays.revert()
        assert overlays.apply(Settings(tag="x"), manifests).names("applied") == ("one",)
    """)


def test_without_a_mode_nothing_is_touched(python):
    python("""
        import vllm.a
        before, path = dict(vars(vllm.a.Manager)), list(sys.meta_path)
        status = overlays.apply(Settings(width_active=False), [manifest("one", BUILD)])
        assert not status.names("applied") and dict(vars(vllm.a.Manager)) == before and sys.meta_path == path
    """)


def test_an_overlay_of_another_mode_is_off_and_not_judged(python):
    python("""
        import vllm.a
        other = manifest("other", RUN, modes=["block"], digest="0" * 32)
        status = overlays.apply(Settings(), [manifest("one", BUILD), other])
        assert status["other"].state == "off" and status.names("applied") == ("one",)
        overlays.revert()
        refused(overlays.DriftError, "overlay other", Settings(block_verify=True), [manifest("one", BUILD), other])
    """)


def test_drift_of_one_overlay_applies_none_and_names_everything(python):
    python("""
        import vllm.a
        drifted = manifest("two", RUN, digest="0" * 32)
        stock, path = vllm.a.Manager.build, list(sys.meta_path)
        error = refused(overlays.DriftError, "vllm/b.py", Settings(), [manifest("one", BUILD), drifted])
        found = reader.fingerprint(*RUN)
        assert (error.overlay, error.file, error.function) == ("two", *RUN)
        assert (error.expected, error.found, error.release) == ("0" * 32, found, "0.33.0")
        for part in ("Other.run", "0" * 32, found, "0.33.0"):
            assert part in str(error)
        assert vllm.a.Manager.build is stock and sys.meta_path == path
    """)


def test_a_missing_function_or_file_is_named(python):
    python("""
        for target in [("vllm/b.py", "Other.gone"), ("vllm/gone.py", "run")]:
            error = refused(overlays.DriftError, "does not exist", Settings(), [manifest("two", target, digest="0" * 32)])
            assert error.found is None and error.file == target[0]
    """)


def test_a_function_that_someone_else_replaced_is_refused_and_none_applied(python):
    python("""
        import vllm.a, vllm.b
        stock = vllm.a.Manager.build
        vllm.b.Other.run = lambda self: "foreign"
        refused(overlays.OverlayError, "replaced before", Settings(), [manifest("one", BUILD), manifest("two", RUN)])
        assert vllm.a.Manager.build is stock
    """)


def test_a_half_applied_state_is_refused(python):
    python("""
        import vllm.a, vllm.b
        manifests = [manifest("one", BUILD), manifest("two", RUN)]
        stock = vllm.b.Other.run
        overlays.apply(Settings(), manifests)
        vllm.b.Other.run = stock
        refused(overlays.OverlayError, "half-applied", Settings(), manifests)
        try:
            overlays.status()
        except overlays.OverlayError as error:
            assert "Other.run" in str(error)
        else:
            raise AssertionError
    """)


def test_a_wrapper_that_this_process_does_not_know_is_refused(python):
    python("""
        import vllm.a
        from dflash_verify.overlays import attach
        overlays.apply(Settings(), [manifest("one", BUILD)])
        attach._applied = None  # as after loading a second copy of this package
        refused(overlays.OverlayError, "already wrapped", Settings(), [manifest("one", BUILD)])
    """)


def test_two_overlays_of_one_function_nest_in_order_and_come_off_together(python):
    python("""
        import vllm.a
        stock = vllm.a.Manager.build
        overlays.apply(Settings(), [manifest("one", BUILD), manifest("two", BUILD)])
        assert vllm.a.Manager().build(1) == ("two", ("one", ("stock", 1)))
        assert vllm.a.Manager.build.__dflash_verify__.overlays == ("one", "two")
        overlays.revert()
        assert vllm.a.Manager.build is stock
    """)


def test_a_wrapper_around_ours_is_no_half_applied_state(python):
    python("""
        import functools, vllm.a
        overlays.apply(Settings(), [manifest("one", BUILD)])
        ours = vllm.a.Manager.build
        vllm.a.Manager.build = functools.wraps(ours)(lambda self, x: ours(self, x))
        assert overlays.status().names("applied") == ("one",)
    """)


def test_a_forked_process_knows_what_its_parent_applied(python):
    python("""
        import os, vllm.a
        manifests = [manifest("one", BUILD), manifest("two", RUN)]
        overlays.apply(Settings(), manifests)
        child = os.fork()
        if child == 0:
            ok = overlays.apply(Settings(), manifests).names("applied") == ("one", "two")
            from vllm.b import Other
            os._exit(0 if ok and Other().run() == ("two", "stock") and vllm.a.Manager().build(1)[0] == "one" else 1)
        assert os.waitpid(child, 0)[1] == 0
    """)


def test_revert_before_the_import_leaves_the_import_alone(python):
    python("""
        path = list(sys.meta_path)
        overlays.apply(Settings(), [manifest("one", BUILD)])
        spec = importlib.util.find_spec("vllm.a")
        overlays.revert()
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        assert module.Manager().build(1) == ("stock", 1) and sys.meta_path == path
    """)


def test_without_vllm_the_sentence_says_so(python):
    python("""
        one = manifest("one", BUILD)
        sys.path.pop(0)
        sys.path[:] = [p for p in sys.path if "site-packages" not in p]
        importlib.invalidate_caches()
        refused(overlays.OverlayError, "not installed", Settings(), [one])
    """)
