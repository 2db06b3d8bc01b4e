"""A fingerprint follows what a function does, not how it is written down, and is the same on every Python."""

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_verify.overlays.fingerprint import find_function, fingerprint

SOURCE = '''
class Builder:
    @torch.inference_mode()
    def build(self, m, *, fast: bool = False) -> "Metadata":
        """Docstring."""
        # comment
        rows = m.rows[: self.width + 1]
        label = f"{rows!r:>{self.width}} and {m.name}" "tail"
        if rows is None or 0 < len(rows) <= 7.5:
            return {"rows": rows, **m.extra}
        with self.lock, open(b"\\x00", "rb") as f:
            async_ = lambda x=1, *a: (yield x)
        return [r for r in rows if r != -1]
'''


def digest(source: str, name: str = "Builder.build") -> str:
    node = find_function(ast.parse(source), name)
    assert node is not None
    return fingerprint(node)


def test_the_digest_is_the_same_on_every_python():
    # Computed on 3.11, 3.12 and 3.13. A change of this value invalidates every fingerprint in overlays/.
    assert digest(SOURCE) == "2e1fc0f5cc72c9a2bac65006dfe5549e"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"""Docstring."""', '"""Another."""'),
        ('"""Docstring."""', "'one'"),
        ("        # comment\n", ""),
        ("rows = m.rows", "rows  =  m.rows"),
        ("return {", "return ({"),
    ],
)
def test_comments_docstrings_and_layout_do_not_count(old, new):
    changed = SOURCE.replace(old, new).replace("({", "{")
    assert digest(changed) == digest(SOURCE)


def code_positions() -> list[int]:
    """Positions of letters and digits in the code after the comment."""
    start = SOURCE.index("rows = m.rows")
    return [i for i in range(start, len(SOURCE)) if SOURCE[i].isalnum()]


@given(st.sampled_from(code_positions()), st.sampled_from("abz019_"))
def test_one_changed_character_of_code_changes_the_digest(position, character):
    changed = SOURCE[:position] + character + SOURCE[position + 1 :]
    try:
        before, after = ast.parse(SOURCE), ast.parse(changed)
    except SyntaxError:
        return  # a file that does not parse has no fingerprint at all
    if ast.dump(before) == ast.dump(after):
        return  # the same character again, or 7.5 written as 7.50
    assert digest(changed) != digest(SOURCE)


def test_the_last_of_several_definitions_counts():
    twice = "def f(): return 1\ndef f(): return 2\n"
    assert digest(twice, "f") == digest("def f(): return 2", "f")


def test_a_function_that_is_not_at_the_top_is_not_found():
    assert find_function(ast.parse("if x:\n    def f(): pass\n"), "f") is None
    assert find_function(ast.parse("class A: pass"), "A.f") is None
    assert find_function(ast.parse("class A: pass"), "B.f") is None
