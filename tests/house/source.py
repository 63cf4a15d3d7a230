"""The project's own source as syntax trees, and the names that its files import. Read once for all house tests."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "finetune"


@dataclass(frozen=True)
class Module:
    """One file: its dotted name, path, text and tree."""

    name: str
    path: Path
    text: str
    tree: ast.Module

    @property
    def room(self) -> str:
        """The folder under finetune/, or the file's own name for the files beside the folders."""
        parts = self.name.split(".")
        return parts[1] if len(parts) > 1 else ""

    def __repr__(self) -> str:
        return self.name


@cache
def modules() -> tuple[Module, ...]:
    """Every Python file of the package."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text(encoding="utf-8")
        found.append(Module(name, path, text, ast.parse(text)))
    return tuple(found)


def names() -> set[str]:
    return {module.name for module in modules()}


def _only_for_types(node: ast.AST) -> bool:
    """Whether a node is `if TYPE_CHECKING:`, whose imports never run."""
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def running(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node that runs: all of them, less the branches for type checkers. Inside functions counts."""
    for node in ast.iter_child_nodes(tree):
        if _only_for_types(node):
            assert isinstance(node, ast.If)
            for other in node.orelse:
                yield other
                yield from running(other)
            continue
        yield node
        yield from running(node)


def imports(module: Module) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every import that runs. `from a import b` names a.b where that is a module, else a."""
    for node in running(module.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module.path}:{node.lineno}: imports are written whole, not relative"
            source = node.module or ""
            for alias in node.names:
                inner = f"{source}.{alias.name}"
                yield node.lineno, inner if inner in names() else source


def functions(module: Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function but kernels of Triton, whose many untyped arguments are that language's own."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not any(
            ast.unparse(decorator).startswith("triton.") for decorator in node.decorator_list
        ):
            yield node


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
    """A function's parameters, less self, cls and an autograd function's ctx; *args and **kwargs count."""
    given = function.args
    found = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    return [one for one in found if one is not None and one.arg not in ("self", "cls", "ctx")]
