"""Docstrings of modules and functions begin with a verb, not a noun clause.

Classes and properties may be nouns: a value is a thing.
"""

from __future__ import annotations

import ast
import re

import pytest
from source_tree import modules, tree

# Add a verb when it says best what a function does.
VERBS = frozenset(re.findall(r"\w+", """
    accept account acquire adapt add admit adopt advance advise allocate announce answer append apply ask assign
    attach balance be begin block bound bring build cache call cancel carry change check checksum choose claim
    clear close collate collect combine compare compile compute concatenate conclude configure connect continue
    convert copy count create cut deal decide declare decode define delete deliver describe detect determine
    discard distribute divide do drain draw drop encode end ensure enter estimate evaluate evict exchange
    execute exit expand explain expose express extend extract feed fetch fill filter find finish fit follow
    forecast forget fork format forward free gather get give go group grow guard hand handle hash have hold
    ignore implement import index inspect iterate join keep kill lay leave lend let lift limit list load locate
    lock log look loop make manage map mark measure merge mix model move name note notice notify number open
    order pack page parse pass perform permute pickle plan plot poll prepare present print provide publish put
    queue raise reach read rebuild receive recommend recompute record reduce refuse register reject release
    remember remove rename repair repeat replace report represent request reserve reset resize resolve restore
    restrict resume retain retry return rewrite round run sample save say scan search see seed select send
    separate serialize serve set shard share show shuffle sleep slice sort split spread stamp start stop store
    stream submit sum summarize take talk teach tell test track translate treat truncate turn undo unmap unpack
    update upload use validate verify view wait wake walk warn watch weigh withdraw work wrap write yield
"""))  # fmt: skip
NOUNS_ARE_FINE = {"property", "cached_property"}  # they are read as attributes are

TWO_MEANINGS = {"Source"}  # of a loop, and of a conversion: both are contracts (docs/glossary.md)


def decorators(node: ast.FunctionDef) -> set[str]:
    return {getattr(item, "id", getattr(item, "attr", "")) for item in node.decorator_list}


def test_docstrings_begin_with_a_verb() -> None:
    findings = []
    seen = 0
    for module in modules():
        for node in ast.walk(tree(module)):
            if isinstance(node, ast.Module) or (
                isinstance(node, ast.FunctionDef) and not decorators(node) & NOUNS_ARE_FINE
            ):
                text = ast.get_docstring(node)
                seen += text is not None
                if text and re.split(r"[^A-Za-z]", text, maxsplit=1)[0].lower() not in VERBS:
                    name = module if isinstance(node, ast.Module) else f"{module}.{node.name}"
                    findings.append(f"{name}: {text.splitlines()[0]}")
    assert seen > 2000
    if findings:
        pytest.fail(
            "\n  ".join(["Begin with a verb and its object, or add the verb to VERBS:", *findings]), pytrace=False
        )


def test_a_name_of_a_class_has_one_meaning() -> None:
    homes: dict[str, list[str]] = {}
    for module in modules():
        for node in tree(module).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(module)
    assert len(homes) > 300
    twice = {name: found for name, found in homes.items() if len(found) > 1 and name not in TWO_MEANINGS}
    assert not twice, f"classes of one name in several modules; give each its own: {twice}"
