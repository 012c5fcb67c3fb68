"""Docstrings of modules and functions begin with a verb, not a noun clause. One package after the other joins DONE.

Classes and properties may be nouns: a value is a thing.
"""

from __future__ import annotations

import ast
import re

import pytest
from test_architecture import is_under, modules, tree

DONE = ("shard_tools", "infra", "streaming.cache", "streaming.decode", "streaming.device", "streaming.integrations")
DONE += ("streaming.job", "streaming.remote")
# Add a verb when it says best what a function does.
VERBS = frozenset(re.findall(r"\w+", """
    account add announce append apply ask begin block bring build call check choose claim clear close collate
    compare convert copy count cut decode define delete describe divide do draw drop encode end evict exit explain
    feed fetch fill find finish fit follow forget gather get give go group guard have hold index iterate join keep
    leave let lift limit list load lock log look make map mark measure merge move note notice number open pack parse
    pass prepare print publish put raise read record refuse release remember remove rename repair repeat report
    reserve reset resize resolve return run save say scan search see select send set share show sleep sort split
    spread start stop sum take talk tell test turn unpack update use verify wait wake walk work write yield
"""))  # fmt: skip
NOUNS_ARE_FINE = {"property", "cached_property"}  # they are read as attributes are


def decorators(node: ast.FunctionDef) -> set[str]:
    return {getattr(item, "id", getattr(item, "attr", "")) for item in node.decorator_list}


def test_docstrings_begin_with_a_verb() -> None:
    findings = []
    seen = 0
    for module in modules():
        if not is_under(module, DONE):
            continue
        for node in ast.walk(tree(module)):
            if isinstance(node, ast.Module) or (
                isinstance(node, ast.FunctionDef) and not decorators(node) & NOUNS_ARE_FINE
            ):
                text = ast.get_docstring(node)
                seen += text is not None
                if text and re.split(r"[^A-Za-z]", text, maxsplit=1)[0].lower() not in VERBS:
                    name = module if isinstance(node, ast.Module) else f"{module}.{node.name}"
                    findings.append(f"{name}: {text.splitlines()[0]}")
    assert seen > 400
    if findings:
        pytest.fail(
            "\n  ".join(["Begin with a verb and its object, or add the verb to VERBS:", *findings]), pytrace=False
        )
