"""Count rooms, floors, imports, lines and comments of one or several checkouts (docs/design/0001-architecture.md).

    python benchmarks/house.py . ../other-checkout

A *room* is ``streaming`` or what lies directly in it, module or package. An *import* is a pair of rooms of which one
imports the other, lazily and for types too. *Floors* are the rooms of the longest way along imports; rooms that import
each other stand on one floor. *Code* is lines that are neither blank, comment nor docstring.
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

TOPS = ("streaming", "shard_tools", "infra")
LONG = 60


def modules(root: Path, top: str) -> dict[str, Path]:
    """Dotted names of the modules below ``root/top``; packages by their own names."""
    found = {}
    for path in sorted((root / top).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(tree: ast.Module, names: set[str]) -> set[str]:
    """Which of ``names`` a module imports (this project has no relative imports)."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            below = {f"{node.module}.{alias.name}" for alias in node.names} & names
            found |= below if len(below) == len(node.names) else {*below, node.module}
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "import_module":
            found |= {str(item.value) for item in node.args if isinstance(item, ast.Constant)}
    return found & names


def pairs_of(files: dict[str, Path], package_of: dict[str, str]) -> set[tuple[str, str]]:
    """Which place imports which other, where every module lies in the place that ``package_of`` says."""
    pairs = set()
    for name, path in files.items():
        for other in imported(ast.parse(path.read_text()), set(files)):
            pairs.add((package_of[name], package_of[other]))
    return {(start, end) for start, end in pairs if start != end}


def floors(pairs: set[tuple[str, str]]) -> int:
    """Rooms on the longest way along ``pairs``; those that reach each other count as one."""
    nodes = {node for pair in pairs for node in pair}
    reach = {node: {end for start, end in pairs if start == node} for node in nodes}
    for _ in nodes:
        reach = {node: ends.union(*(reach[end] for end in ends)) for node, ends in reach.items()}
    group = {node: frozenset({node} | {end for end in reach[node] if node in reach[end]}) for node in nodes}
    below = {group[node]: {group[end] for end in reach[node]} - {group[node]} for node in nodes}

    def height(room: frozenset[str]) -> int:
        known[room] = known.get(room) or 1 + max((height(other) for other in below[room]), default=0)
        return known[room]

    known: dict[frozenset[str], int] = {}
    return max(map(height, below))


def docstring_lines(tree: ast.Module) -> int:
    """Lines of all docstrings."""
    total = 0
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node, clean=False):
            total += (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
    return total


def code_and_comments(text: str) -> tuple[int, int]:
    """Lines of code, and comments (those for tools, such as ``noqa``, left out)."""
    comments = lone = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            words = token.string.lstrip("# ")
            comments += not words.startswith(("noqa", "type:", "fmt:"))
            lone += token.line.lstrip().startswith("#")
    filled = sum(bool(line.strip()) for line in text.splitlines())
    return filled - lone - docstring_lines(ast.parse(text)), comments


def long_functions(files: dict[str, Path]) -> int:
    """Functions of more than 60 lines, decorators and docstring left out."""
    count = 0
    for path in files.values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                text = ast.get_docstring(node, clean=False) is not None
                doc = (node.body[0].end_lineno or 0) - node.body[0].lineno + 1 if text else 0
                count += (node.end_lineno or 0) - node.lineno + 1 - doc > LONG
    return count


def constructor(root: Path) -> str:
    """What ``DataLoader(…)`` takes."""
    table = root / "streaming/run/options/loader_options.py"
    if table.exists():  # the constructor takes the fields of the table, behind the dataset
        classes = [node for node in ast.parse(table.read_text()).body if isinstance(node, ast.ClassDef)]
        options = next(one for one in classes if one.name == "LoaderOptions")
        named = sum(isinstance(node, ast.AnnAssign) for node in options.body) - 1
        return f"2 positional, {named} named"
    tree = ast.parse((root / "streaming/loader.py").read_text())
    loader = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "DataLoader")
    init = next(node for node in loader.body if isinstance(node, ast.FunctionDef) and node.name == "__init__").args
    rest = f", **{init.kwarg.arg}" if init.kwarg else ""
    return f"{len(init.args) - 1} positional, {len(init.kwonlyargs)} named{rest}"


def figures(root: Path) -> dict[str, str]:
    """All figures of one checkout."""
    files = modules(root, "streaming")
    rooms = {name: ".".join(name.split(".")[:2]) for name in files}
    folders = {n: n if path.name == "__init__.py" else n.rpartition(".")[0] for n, path in files.items()}
    pairs, folder_pairs = pairs_of(files, rooms), pairs_of(files, folders)
    sizes = Counter(folders.values())
    lines = Counter(dict.fromkeys(sizes, 0))
    for name, path in files.items():
        lines[folders[name]] += len(path.read_text().splitlines())
    largest, most = lines.most_common(1)[0], sizes.most_common(1)[0]
    below_root = {(a, b) for a, b in folder_pairs if "streaming" not in (a, b)}
    found = {
        "rooms directly in `streaming/`": str(len(set(rooms.values()))),
        "of these modules": str(sum("." not in name.removeprefix("streaming.") and "." in name and
                                    path.name != "__init__.py" for name, path in files.items())),
        "floors": str(floors(pairs)),
        "imports between rooms": str(len(pairs)),
        "pairs of packages that import each other": str(sum((b, a) in below_root for a, b in below_root) // 2),
        "most modules in one folder": f"{most[1] - 1} (`{most[0]}`)",
        "largest package": f"{largest[1]:,} lines (`{largest[0]}`)",
        "functions of more than 60 lines": str(sum(long_functions(modules(root, top)) for top in TOPS)),
        "`DataLoader(…)`": constructor(root),
    }  # fmt: skip
    for top in TOPS:
        texts = [path.read_text() for path in modules(root, top).values()]
        code, comments = (sum(column) for column in zip(*map(code_and_comments, texts), strict=True))
        found[f"`{top}/`: lines"] = f"{sum(len(text.splitlines()) for text in texts):,}"
        found[f"`{top}/`: lines of code"] = f"{code:,}"
        found[f"`{top}/`: lines of code per comment"] = f"{code / max(1, comments):.0f}"
    return found


def main() -> None:
    """Print a table with a column for each checkout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("roots", nargs="*", type=Path, default=[Path()])
    roots = parser.parse_args().roots
    columns = [figures(root) for root in roots]
    print("|" + "".join(f" | {root.resolve().name}" for root in roots) + " |")
    print("|---" * (len(roots) + 1) + "|")
    for name in columns[0]:
        print(f"| {name} | " + " | ".join(column.get(name, "") for column in columns) + " |")


if __name__ == "__main__":
    main()
