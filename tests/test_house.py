"""The shape of the house: which module may import which, how long a file may be, what it may be called, how it begins.

The rows are those of `docs/architecture.md`. A module imports from rows below its own; within a row only from its own
package, except that the small files of the seventh row may import each other. `method/` knows torch and nothing else.
"""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "blockskip"
MAX_LINES = 350
BANNED_NAMES = ("utils", "helpers", "manager")
ROWS: tuple[frozenset[str], ...] = tuple(
    frozenset(row.split())
    for row in (
        "__main__",
        "cli",
        "benchmark selection",
        "run",
        "planner report",
        "encoding features training preview",
        "loading adapters data store evaluation",
        "families",
        "config settings options presets errors keys locks seeds precision measure progress memory units waiting",
        "method builtin",
    )
)
SMALL_FILES = next(row for row in ROWS if "keys" in row)
DISTRIBUTIONS = {"PIL": "pillow"}  # where an import is not called like the package that brings it
INSTALLED_FOR_OTHERS = {"accelerate", "transformers"}  # declared because diffusers and PEFT need them

MODULES = sorted(SOURCE.rglob("*.py"))
FILES = sorted(path for folder in ("src", "tests", "tools", "benchmarks") for path in (ROOT / folder).rglob("*.py"))


def shown(path: Path) -> str:
    """A path as the reports of pytest name it."""
    return path.relative_to(ROOT).as_posix()


def module_name(path: Path) -> str:
    """`blockskip.method.split` for its file; a package's `__init__.py` has the package's name."""
    parts = ("blockskip", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(text: str, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of everything a module imports, wherever in its text (functions, type checking).

    `from blockskip import keys` counts as `blockskip.keys`; relative imports are resolved.
    """
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                upwards = parts[: len(parts) - node.level + is_package]
                base = ".".join([*upwards, *([base] if base else [])])
            if base == "blockskip":
                yield from ((node.lineno, f"blockskip.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, base


def row_of(name: str) -> int | None:
    """The number of the row (0 on top) of a package or file right under `blockskip`; None: it has none."""
    return next((number for number, row in enumerate(ROWS) if name in row), None)


def violations(text: str, module: str, is_package: bool = False) -> list[str]:
    """What a module imports against the rules, one sentence each."""
    if module == "blockskip":
        return []  # the public names, imported on first use
    own = module.split(".")[1]
    own_row = row_of(own)
    if own_row is None:
        return [f'{module}: "{own}" has no row; give it one in docs/architecture.md and in ROWS of this test']
    found = []
    for line, name in imports(text, module, is_package):
        top, _, rest = name.partition(".")
        target = rest.split(".")[0]
        where = f"{module}, line {line}: imports {name}"
        if top != "blockskip":
            if own == "method" and top != "torch" and top not in sys.stdlib_module_names:
                found.append(f"{where}; method/ is torch and the standard library only")
        elif target != own:
            row = row_of(target)
            if target == "__version__":
                continue
            if row is None:
                found.append(f"{where}, which has no row")
            elif row < own_row or (row == own_row and not {own, target} <= SMALL_FILES):
                found.append(f"{where}, which is not in a row below")
    return found


def third_party(text: str, module: str, is_package: bool = False) -> set[str]:
    """The packages from outside that a module imports, by the names under which they are installed."""
    tops = {name.partition(".")[0] for _, name in imports(text, module, is_package)}
    outside = {top for top in tops if top not in sys.stdlib_module_names and top != "blockskip"}
    return {normal(DISTRIBUTIONS.get(top, top)) for top in outside}


def normal(name: str) -> str:
    """A package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def test_there_is_something_to_read() -> None:
    assert len(MODULES) > 5
    assert {module_name(path) for path in MODULES} >= {"blockskip", "blockskip.method"}


@pytest.mark.parametrize("path", MODULES, ids=shown)
def test_a_module_imports_only_from_rows_below(path: Path) -> None:
    found = violations(path.read_text(encoding="utf-8"), module_name(path), path.name == "__init__.py")
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("blockskip.method.split", "import numpy"),
        ("blockskip.method.split", "def f():\n    from blockskip.keys import digest"),
        ("blockskip.method.split", "from .. import keys"),
        ("blockskip.families.flux", "from blockskip.loading import load"),
        ("blockskip.families.flux", "from ..training.job import train"),
        ("blockskip.encoding.text", "import blockskip.features.store as store"),
        ("blockskip.report.page", "from blockskip import run"),
        ("blockskip.keys", "from blockskip.store.files import write"),
        ("blockskip.run", "from blockskip import train"),
        ("blockskip.run", "from blockskip.anything import name"),
        ("blockskip.anything", "import torch"),
    ],
)
def test_an_import_against_the_rules_is_seen(module: str, text: str) -> None:
    assert len(violations(text, module)) == 1


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (
            "blockskip.method.split",
            "import math, torch\nfrom torch import nn\nfrom blockskip.method.layout import BlockLayout",
        ),
        ("blockskip.method.split", "from .layout import BlockLayout"),
        ("blockskip.keys", "from blockskip.errors import UserError"),
        ("blockskip.families.flux", "import diffusers\nfrom blockskip import method, errors\nfrom . import sana"),
        ("blockskip.benchmark.demo", "from blockskip.run import train\nfrom blockskip.report import page"),
        ("blockskip.cli", "from blockskip import __version__, run\nfrom blockskip.benchmark import demo"),
        ("blockskip", "from blockskip import run"),
    ],
)
def test_an_import_within_the_rules_passes(module: str, text: str) -> None:
    assert violations(text, module) == []


def test_what_is_imported_is_declared_and_what_is_declared_is_imported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]

    def names(requirements: list[str]) -> set[str]:
        return {normal(re.split(r"[^\w.-]", requirement)[0]) for requirement in requirements}

    runtime = names(project["dependencies"])
    optional = names([item for extra, items in extras.items() if extra != "dev" for item in items])
    imported = set().union(
        *(
            third_party(path.read_text(encoding="utf-8"), module_name(path), path.name == "__init__.py")
            for path in MODULES
        )
    )
    assert imported <= runtime | optional, "imported, not in pyproject.toml"
    assert runtime <= imported | INSTALLED_FOR_OTHERS, "in pyproject.toml, imported nowhere"


@pytest.mark.parametrize("path", FILES, ids=shown)
def test_a_file_is_short_well_named_and_says_what_it_is(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_LINES, f"more than {MAX_LINES} lines: divide it"
    for part in path.relative_to(ROOT).with_suffix("").parts:
        assert not any(banned in part.lower() for banned in BANNED_NAMES), f'"{part}" says nothing; name what it does'
    first = ast.get_docstring(ast.parse(text), clean=False) or ""
    assert first.partition("\n")[0].strip(), "the first line of the file must say in a docstring what it is"
    assert text.startswith(('"""', "#!")), "the docstring comes first"
