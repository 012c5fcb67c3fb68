"""The house: which wing and room imports which, as drawn in docs/design/0001-architecture.md, and what none may do.

Every test reads the whole source and lists all that it finds at once. Most findings are cured in the code; where a
new arrow between packages is meant, the message has the line of the drawing as it would read.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache

from torch.utils._device import _device_constructors

from tests.support.code.folders import ROOT, TESTS
from tests.support.code.source_tree import (
    KNOWN_TO,
    NEVER_RUN,
    NOT_DECLARED,
    OPTIONAL,
    PACKAGES,
    imports,
    is_under,
    modules,
    nodes,
    ours,
    report,
    tree,
)

PAGE = "docs/design/0001-architecture.md"
WINGS = {
    "streaming": ("others", "run", "sets", "shards", "build", "order", "watch", "common"),
    "shard_tools": ("look", "change", "make"),
}
"""Wings with rooms; the others are one room: testing, contracts, storage, integrations, running, the face, …"""
WORDS = ("streaming.errors", "streaming.types")  # public by these names, so they lie beside the wings

MOST_ROOMS = 12  # modules in one folder, so that the room of a line is found by reading names
MOST_LINES = 60  # of a function, without decorators and docstring
TWO_MEANINGS = {"Source"}  # of a loop, and of a conversion: both are contracts (docs/glossary.md)

PURE = ("ORDER", "schema", "index", "tar", "migration_hints")
TOOLS = ("TERMINAL", "LOOK", "CHANGE", "MAKE", "RUNNING")
# What holds whatever the drawing says: (who, may not import). Rooms of the drawing; wings in capitals.
FORBIDDEN = (
    (TOOLS, ("RUN", "OTHERS", "INTEGRATIONS")),
    (
        (
            *PURE,
            "SHARDS",
            "BUILD",
            "STORAGE",
            "filters",
            "job",
            "engine",
            "engine.memory",
            "engine.workers",
            "engine.unindexed",
        ),
        ("infra",),
    ),
    (PURE, ("STORAGE", "cache", "job", "catalog", "fetch")),
    (("infra", "COMMON"), ("ANY",)),
)
# infra asks where the program runs; credentials come the way people have them; workers get the environment whole.
ENVIRONMENT_MAY = ("infra.launch", "streaming.storage.adapters.credentials")
ENVIRONMENT_MAY += ("streaming.run.engine.workers.surroundings", "shard_tools.running.process_main")
ENVIRONMENT_MAY += ("shard_tools.terminal.config_file",)  # as click reads options there
ENVIRONMENT_MAY += ("shard_tools.look.show.decoding.workers",)  # what little of it a process gets
ENVIRONMENT_MAY += ("streaming.build.decode.images",)  # puts back what the import of cv2 writes there
# Pure modules of packages that also do I/O.
ALSO_PURE = (
    "streaming.shards.fetch.layout",
    "streaming.shards.fetch.damage",
    "streaming.shards.fetch.checksums",
    "streaming.shards.fetch.pieces",
)


# --- the source


# --- the drawing


def block_of(kind: str) -> str:
    block = (ROOT / PAGE).read_text().partition(f"```{kind}\n")[2].partition("\n```")[0]
    assert block, f"{PAGE} has no block ```{kind} with a drawing"
    return block


@cache
def wings() -> dict[str, frozenset[str]]:
    """The arrows of each wing, from top to bottom."""
    lines = (line.partition("→") for line in block_of("wings").splitlines())
    return {name.strip(): frozenset(targets.split()) for name, _, targets in lines}


@cache
def drawing() -> tuple[dict[str, frozenset[str]], dict[str, str]]:
    """The arrows of each package, from top to bottom, and the layer of each (in capitals)."""
    arrows: dict[str, frozenset[str]] = {}
    layers: dict[str, str] = {}
    layer = ""
    for line in block_of("house").splitlines():
        if line and not line.startswith(" "):
            layer = line.partition("  ")[0].upper()
        elif line.strip():
            names, _, targets = line.partition("→")
            for name in names.split():
                arrows[name] = frozenset(targets.split())
                layers[name] = layer
    return arrows, layers


@cache
def room(module: str) -> str:
    """The name in the drawing of the package that ``module`` lies in: its path without the wing."""
    package = module if modules()[module].name == "__init__.py" else module.rpartition(".")[0]
    if package == "streaming.common" or module in WORDS:
        return "words"
    top, *names = package.split(".")
    if names and names[0] in WINGS.get(top, ()):
        del names[0]
    return ".".join(names if top == "streaming" and names else [top, *names])


@cache
def wing_of(module: str) -> str:
    """The name of the wing that ``module`` lies in."""
    top, name = [*module.split("."), ""][:2]
    if module in WORDS:
        return "common"
    if top == "shard_tools":
        return name if name in (*WINGS[top], "running") else "terminal"
    ours_too = (*WINGS["streaming"], "storage", "integrations", "contracts", "testing")
    return name if name in ours_too else {"streaming": "face"}.get(top, top)


@cache
def edges() -> dict[tuple[str, str], list[str]]:
    """Which package imports which, with the imports of modules that make it so. Words are free to all."""
    found = defaultdict(list)
    for module in modules():
        for name in ours(module):
            if room(name) not in {"words", room(module)}:
                found[room(module), room(name)].append(f"{module} imports {name}")
    return found


@cache
def wing_edges() -> dict[tuple[str, str], list[str]]:
    """Which wing imports which, with the imports of modules that make it so. ``common`` is free to all."""
    found = defaultdict(list)
    for module in modules():
        for name in ours(module):
            if wing_of(name) not in {"common", wing_of(module)}:
                found[wing_of(module), wing_of(name)].append(f"{module} imports {name}")
    return found


def layer(name: str) -> str:
    """The wing of a room, in capitals: a heading of the drawing."""
    return "COMMON" if name == "words" else drawing()[1].get(name, "")


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    return name in patterns or layer(name) in patterns or "ANY" in patterns


def is_known_to(module: str, patterns: tuple[str, ...]) -> bool:
    return is_under(module, patterns) or layer(room(module)) in patterns


def test_the_drawing_shows_every_import_between_packages() -> None:
    drawn, _ = drawing()
    order = [*drawn]
    empty = {f"{top}.{wing}" for top, names in WINGS.items() for wing in names}
    there: dict[str, set[str]] = {room(module): set() for module in modules() if module not in empty}
    for start, end in edges():
        there[start].add(end)
    gone = [name for name in drawn if name not in there]
    findings = [f"{name} is drawn, but there is no such package: take its line out" for name in gone]
    for name, targets in there.items():
        if name == "words":
            findings += [f"words import {target}: {edges()['words', target][0]}" for target in targets]
            continue
        marked = drawn.get(name, frozenset())
        if name in drawn and marked == targets:
            continue
        why = "; ".join([edges()[name, new][0] for new in sorted(targets - marked)][:3]) or "some arrows are gone"
        right = sorted(targets, key=lambda target: order.index(target) if target in order else -1)
        findings.append(f"{name}: {why}. Its line would read:\n    {name} → {' '.join(right)}")
    report(findings, f"The drawing in {PAGE} and the imports differ. Is the import needed? Then draw it:")


def test_the_drawing_shows_every_import_between_wings() -> None:
    drawn, order = wings(), [*wings()]
    there: dict[str, set[str]] = {wing_of(module): set() for module in modules()}
    for start, end in wing_edges():
        there[start].add(end)
    findings = [f"{name} is drawn, but there is no such wing" for name in drawn.keys() - there.keys()]
    for name, targets in there.items():
        if drawn.get(name) != targets:
            new = [wing_edges()[name, one][0] for one in sorted(targets - drawn.get(name, frozenset()))]
            right = sorted(targets, key=lambda one: order.index(one) if one in order else -1)
            findings.append(f"{name}: {'; '.join(new)}. Its line would read:\n    {name} → {' '.join(right)}")
    report(findings, f"The drawing of the wings in {PAGE} and the imports differ:")
    up = [(start, end) for start, end in wing_edges() if order.index(end) <= order.index(start)]
    report([f"{start} → {end}: {wing_edges()[start, end][0]}" for start, end in up], "A wing imports what is below it:")


def test_arrows_point_down() -> None:
    drawn, _ = drawing()
    order = [*drawn]
    up = {(start, end) for start, end in edges() if start != "words" and order.index(end) <= order.index(start)}
    findings = [f"{start} → {end}: {edges()[start, end][0]}" for start, end in up]
    cure = "A package imports only what stands below it in the drawing, so that no two import each other. Move what is "
    cure += f"shared to the lower one, or the lines of the drawing in {PAGE}:"
    report(findings, cure)


def test_modules_do_not_import_in_a_circle() -> None:
    done: set[str] = set()
    findings: list[str] = []

    def visit(module: str, path: tuple[str, ...]) -> None:
        if module in path:
            findings.append(" → ".join((*path[path.index(module) :], module)))
        elif module not in done:
            for name in sorted(ours(module)):
                visit(name, (*path, module))
            done.add(module)

    for module in modules():
        visit(module, ())
    report(findings, "Modules import each other in a circle, lazily or for types. Move what both need to a third:")


def test_layers_keep_their_promises() -> None:
    findings = []
    for who, what in FORBIDDEN:
        unknown = {*who, *what} - {"ANY", *drawing()[0], *drawing()[1].values()}
        assert not unknown, f"FORBIDDEN names what is not in the drawing: {unknown}"
        for (start, end), why in edges().items():
            if matches(start, who) and matches(end, what):
                findings += why
    report(findings, "A layer imports what it must not know (FORBIDDEN):")


def test_every_package_says_what_lives_there_and_what_may_not() -> None:
    findings = []
    for module, path in modules().items():
        if path.name == "__init__.py":
            text = ast.get_docstring(tree(module)) or ""
            if not re.search(r"\b(no|not|nothing|never|none|neither|only|alone)\b", text, re.IGNORECASE):
                findings.append(f"{path.relative_to(ROOT)}: {text.splitlines()[:1]}")
    report(findings, "A package's docstring says in a line or two what lives there, and what does not:")


def test_no_folder_is_a_corridor() -> None:
    rooms = Counter(path.parent for path in modules().values() if path.name != "__init__.py")
    findings = [f"{folder.relative_to(ROOT)}: {count}" for folder, count in rooms.items() if count > MOST_ROOMS]
    report(findings, f"At most {MOST_ROOMS} modules lie in one folder. Fold short ones into neighbors, or part it:")


def test_tests_lie_in_folders_and_share_no_code_but_through_support() -> None:
    findings = []
    homes: dict[str, str] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        name = str(path.relative_to(TESTS))
        if path.name in homes:
            findings.append(f"{name} has the name of {homes[path.name]}, and pytest imports only one of them")
        homes[path.name] = name
        if path.parent == TESTS:
            findings.append(f"{name} lies in no folder")
        taken = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        others = [node for node in taken if (node.module or "").rpartition(".")[2].startswith("test_")]
        findings += [f"{name}:{node.lineno} imports from {node.module}" for node in others]
    report(findings, "A test file lies in the folder of its package, and what several need in tests/support:")


def functions(module: str) -> Iterator[tuple[str, int]]:
    """The name of each function of ``module`` and its lines, without decorators and docstring."""

    def walk(parent: ast.AST, prefix: str) -> Iterator[tuple[str, int]]:
        for node in ast.iter_child_nodes(parent):
            name = f"{prefix}.{node.name}" if isinstance(node, (ast.ClassDef, ast.FunctionDef)) else prefix
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno is not None
                lines = node.end_lineno - node.lineno + 1
                if ast.get_docstring(node, clean=False) is not None:
                    assert node.body[0].end_lineno is not None
                    lines -= node.body[0].end_lineno - node.body[0].lineno + 1
                yield name, lines
            yield from walk(node, name)

    return walk(tree(module), module)


def test_functions_are_short() -> None:
    sizes = [one for module in modules() for one in functions(module)]
    findings = [f"{name}: {lines} lines" for name, lines in sizes if lines > MOST_LINES]
    report(findings, f"A function has at most {MOST_LINES} lines without its docstring. Part it by what it does:")


def test_no_method_only_refuses() -> None:
    """What only some kinds can do is a value that others lack (docs/design/0039); batteries say what to override."""
    findings = []
    for module in modules():
        for node in nodes(module):
            if not isinstance(node, ast.FunctionDef) or is_under(module, ("streaming.testing",)):
                continue
            body = [one for one in node.body if not isinstance(one, ast.Expr)]
            if len(body) == 1 and isinstance(body[0], ast.Raise) and body[0].exc is not None:
                error = ast.unparse(body[0].exc).partition("(")[0]
                if error in {"NotImplementedError", "AssertionError"}:
                    findings.append(f"{module}:{node.lineno} {node.name}")
    report(findings, "A method whose body is a refusal is no method of this kind; hold what only some can do:")


def is_lock(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute | ast.Name) and bool(re.search(r"(lock|changed)$", ast.unparse(node)))


def test_blocks_under_a_lock_say_what_holds_after_them() -> None:
    findings, num_blocks = [], 0
    for module, path in modules().items():
        rows = path.read_text().splitlines()
        for node in nodes(module):
            if isinstance(node, ast.With) and any(is_lock(item.context_expr) for item in node.items):
                num_blocks += 1
                block = rows[node.lineno - 2 : node.end_lineno]
                if not any(re.search(r"#(?! (noqa|type:|fmt:))", row) for row in block):
                    findings.append(f"{module}:{node.lineno}")
    assert num_blocks > 100
    report(findings, "A comment in each block under a lock says what holds when it is released:")


def test_a_name_of_a_class_has_one_meaning() -> None:
    homes: dict[str, list[str]] = {}
    for module in modules():
        for node in tree(module).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(module)
    assert len(homes) > 300
    twice = {name: found for name, found in homes.items() if len(found) > 1 and name not in TWO_MEANINGS}
    assert not twice, f"classes of one name in several modules; give each its own: {twice}"


# --- what others made, and what nobody may do


def test_third_party_packages_are_known_where_the_table_says() -> None:
    findings = []
    for module in modules():
        for name in imports(module):
            package = name.split(".")[0]
            if package in {*PACKAGES, *sys.stdlib_module_names, *OPTIONAL, *NEVER_RUN}:
                continue
            if not is_known_to(module, KNOWN_TO.get(package, ())):
                findings.append(f"{module} imports {name}; it is known to {KNOWN_TO.get(package, 'nobody')}")
    for package in OPTIONAL:
        users = [m for m in modules() if package in {name.split(".")[0] for name in imports(m)}]
        if len({user.split(".")[0] for user in users}) < len(users):
            findings.append(f"{package}, an extra, is known to more than one module of a package: {users}")
        for user in users:
            top = {a.name for n in tree(user).body if isinstance(n, ast.Import) for a in n.names}
            top |= {n.module or "" for n in tree(user).body if isinstance(n, ast.ImportFrom)}
            if package in {name.split(".")[0] for name in top}:
                findings.append(f"{user} needs {package}, an extra, just to be imported")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {re.split(r"[\[<>=!~ ]", line)[0].lower() for line in project["dependencies"]}
    used = {name.split(".")[0] for module in modules() for name in imports(module)} & KNOWN_TO.keys()
    distributions = {"PIL": "pillow"}
    missing = {distributions.get(name, name) for name in used.difference(NOT_DECLARED)} - declared
    findings += [f"{name} is imported, but pyproject.toml does not ask for it" for name in missing]
    report(findings, "Each package of others has one place that knows it (KNOWN_TO, OPTIONAL, docs/design/0002):")


def test_only_infra_reads_the_environment() -> None:
    findings = []
    for module in modules():
        for node in nodes(module):
            named = isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv", "environb", "putenv"}
            taken = isinstance(node, ast.ImportFrom) and node.module == "os"
            taken = taken and bool({a.name for a in node.names} & {"environ", "getenv"})
            if (named or taken) and not is_under(module, ENVIRONMENT_MAY):
                findings.append(f"{module}:{node.lineno}")
    report(findings, "The environment is read by infra alone; take what it says as an argument:")


def test_no_tensor_of_ours_lies_where_the_script_puts_its_own() -> None:
    """``torch.set_default_device`` is about what a script makes: a batch or a message that lay there would be lost."""
    makers = {one.__name__ for one in _device_constructors()}
    findings = []
    for module in modules():
        at_home = {
            id(node.func)
            for node in nodes(module)
            if isinstance(node, ast.Call) and any(one.arg == "device" for one in node.keywords)
        }
        for node in nodes(module):
            if not isinstance(node, ast.Attribute) or node.attr not in makers or id(node) in at_home:
                continue
            if ast.unparse(node.value) in {"torch", "torch.fft", "torch.nested", "torch.sparse"}:
                findings.append(f"{module}:{node.lineno} {ast.unparse(node)}")
    report(
        findings,
        "Make tensors by `fresh` or `int64s` of streaming.build.batches.jagged, or from NumPy, or say device=:",
    )


def test_the_pure_layer_does_no_io_and_reads_no_clock() -> None:
    banned = {"time", "random", "secrets", "tempfile", "shutil", "socket", "subprocess", "threading", "multiprocessing"}
    pure = [module for module in modules() if matches(room(module), PURE) or module in ALSO_PURE]
    assert len(pure) > 20
    findings = []
    for module in pure:
        findings += [f"{module} imports {name}" for name in imports(module) & banned]
        for node in nodes(module):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "open":
                findings.append(f"{module}:{node.lineno} opens a file")
            if isinstance(node, ast.Attribute) and node.attr == "random":
                findings.append(f"{module}:{node.lineno}: numpy.random changes between releases, the order must not")
    report(findings, "The pure layer goes from values to values:")


def test_no_pickle_of_data_no_shell_no_eval() -> None:
    findings = []
    for module in modules():
        for node in nodes(module):
            if isinstance(node, ast.Call):
                keywords = {k.arg: k.value for k in node.keywords}
                for name in ("shell", "allow_pickle"):
                    value = keywords.get(name)
                    if isinstance(value, ast.Constant) and value.value:
                        findings.append(f"{module}:{node.lineno}: {name}={value.value}")
                if getattr(node.func, "id", "") in {"eval", "exec"}:
                    findings.append(f"{module}:{node.lineno} evaluates text")
    report(findings, "Data never runs code:")


def test_no_code_at_the_top_but_definitions() -> None:
    acting = (ast.For, ast.While, ast.With, ast.AsyncFor, ast.AsyncWith, ast.Delete, ast.Raise)
    findings = []
    for module in modules():
        for node in tree(module).body:
            call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
            if call or isinstance(node, acting):
                findings.append(f"{module}:{node.lineno}")
    report(findings, "Modules define; they do nothing when they are imported:")
