"""How much of a solution is the engine's own part, or another student's: trees compared without names and comments.

Same code under other names, with other comments and annotations, has the same normalised tree. What is short looks
alike whoever writes it, so a function counts only from some size on.
"""

from __future__ import annotations

import ast
import inspect
from difflib import SequenceMatcher
from pathlib import Path

LEAST_NODES = 60  # of a tree that is compared


class _Normal(ast.NodeTransformer):
    """Names by the order in which they first occur; no docstrings, annotations or types of arguments."""

    def __init__(self, own: set[str]) -> None:
        self._own = own  # attributes that the code gives to its objects
        self._names: dict[str, str] = {}

    def _plain(self, name: str) -> str:
        return self._names.setdefault(name, f"n{len(self._names)}")

    def visit_Name(self, node: ast.Name) -> ast.AST:
        node.id = self._plain(node.id)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        node.attr = self._plain(f".{node.attr}") if node.attr in self._own else node.attr
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.arg, node.annotation = self._plain(node.arg), None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        if node.value is None:
            return None
        return self.visit(ast.copy_location(ast.Assign(targets=[node.target], value=node.value), node))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.name, node.returns = self._plain(node.name), None
        return self._without_text(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.name = self._plain(node.name)
        return self._without_text(node)

    def _without_text(self, node: ast.FunctionDef | ast.ClassDef) -> ast.AST:
        node.body = [n for n in node.body if not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))]
        self.generic_visit(node)
        return node


def normalised(source: str, name: str) -> list[str]:
    """The tree of a function or class of this name as a list of its nodes; empty if there is none, or it is small."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            stored = (n for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
            nodes = [_label(n) for n in ast.walk(_Normal({n.attr for n in stored}).visit(node))]
            return nodes if len(nodes) >= LEAST_NODES else []
    return []


def _label(node: ast.AST) -> str:
    """A node's kind, and what it says by itself."""
    own = [getattr(node, field, None) for field in ("id", "arg", "attr", "name", "value")]
    return " ".join([type(node).__name__, *(str(value) for value in own if isinstance(value, str | int | float))])


def likeness(mine: list[str], other: list[str]) -> float:
    """From 0 to 1: how much of two trees is alike. 0 where one is missing."""
    return SequenceMatcher(None, mine, other, autojunk=False).ratio() if mine and other else 0.0


def engine_source(part: object) -> str:
    """The source file of an engine's part."""
    return Path(inspect.getsourcefile(part)).read_text(encoding="utf-8")
