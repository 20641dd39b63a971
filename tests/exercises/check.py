"""What a solution may not take from elsewhere: the engine's own parts, and the library operation that it is about.

Read from the syntax tree, also where a name stands in a string: for `getattr`, `importlib` or `exec`. It is no fence
against ill will, of which there are always more ways (a report for instructors tells what looks alike: similar.py).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

GIVEN = {"tinyengine.errors", "tinyengine.model.inputs"}  # what stubs import
SOURCES = {"tinyengine", "exercises", "transformers", "vllm", "sglang", "flash_attn", "xformers", "cachetools"}
ATTENTION = {
    "scaled_dot_product_attention",
    "flex_attention",
    "multi_head_attention_forward",
    "MultiheadAttention",
    "Transformer",
    "TransformerEncoderLayer",
    "TransformerDecoderLayer",
    "_scaled_dot_product_attention_math",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward",
    "_efficient_attention_forward",
    "_native_multi_head_attention",
}
OPERATIONS = {1: ATTENTION, 5: ATTENTION, 9: {"CUDAGraph", "make_graphed_callables"}, 12: {"lru_cache"}}
HIDES = {"import_module", "__import__", "exec", "eval"}  # where a name may be put together from pieces


def taken(number: int, source: str) -> str | None:
    """The first thing that a solution of this exercise takes and may not, with its line; None if there is none."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return None  # the process that loads it says so better
    found = sorted(set(_modules(tree)) | set(_operations(tree, OPERATIONS.get(number, set()))))
    return f"line {found[0][0]}: {found[0][1]}" if found else None


def _modules(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Imports of what is not given, and what may hide one."""
    told = "is not for solutions: an exercise is written with Python, torch and numpy"
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and _name(node.func) in HIDES:
            if not all(isinstance(arg, ast.Constant) for arg in node.args[:1]):
                yield node.lineno, f"{_name(node.func)} of something that is not a constant {told}"
        elif isinstance(node, ast.Attribute) and node.attr == "modules" and _name(node.value) == "sys":
            yield node.lineno, f"sys.modules {told}"
        for name in names:
            if name.split(".")[0] in SOURCES and not _is_given(name):
                yield node.lineno, f"{name} {told}"
    for line, text in _strings(tree):
        for name in re.findall(rf"\b(?:{'|'.join(SOURCES)})\b(?:\.\w+)*", text):
            if not _is_given(name) and ("." in name or name == text):
                yield line, f"{name} {told}"


def _is_given(name: str) -> bool:
    """Whether it is a module that stubs import, or stands in one."""
    return any(name == given or name.startswith(f"{given}.") for given in GIVEN)


def _operations(tree: ast.AST, forbidden: set[str]) -> Iterator[tuple[int, str]]:
    """Names of library operations, as attributes, imports, or within strings."""
    told = "is what this exercise is about: write it yourself"
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Attribute | ast.Name):
            names = [_name(node)]
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
        for name in names:
            if name in forbidden:
                yield node.lineno, f"{name} {told}"
    for line, text in _strings(tree):
        for name in re.findall(r"\w+", text):
            if name in forbidden:
                yield line, f"{name} {told}"


def _name(node: ast.AST) -> str:
    """The last name of `a.b.c`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _strings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """String constants with their lines; a string that is a statement, a docstring say, does nothing."""
    idle = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in idle:
            yield node.lineno, node.value


def check(number: int, path: Path) -> str | None:
    """See `taken`; a file that cannot be read has none."""
    try:
        return taken(number, path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return None
