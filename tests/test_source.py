"""Promises about the source itself, read from its syntax trees: what it may import, and in which direction."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "tinyengine"
FILES = sorted(path for path in PACKAGE.rglob("*.py"))
FORBIDDEN = {"triton", "jax", "jaxlib", "flash_attn", "vllm", "sglang", "cupy", "numba"}
# Each part may import those named beside it, and itself. A circle is impossible by construction.
MAY_IMPORT = {
    "errors": set(),
    "device": {"errors"},
    "cli": {"errors"},
    "figures": {"errors"},
    "interrupts": set(),
    "tolerance": set(),
    "kv": {"device", "errors"},
    "model": {"device", "errors", "kv", "tolerance"},
    "sampling": {"device", "errors"},
    "sequence": {"kv", "sampling"},
    "scheduler": {"kv", "sequence"},
    "parts": {"graphs", "kv", "model", "sampling", "scheduler"},
    "batch": {"device", "kv", "model", "parts", "scheduler"},
    "flight": {"request", "scheduler", "sequence"},
    "loading": {"errors", "model"},
    "request": {"model", "sequence"},
    "graphs": {"errors", "kv", "model"},
    "engine": {
        "batch",
        "device",
        "errors",
        "flight",
        "graphs",
        "interrupts",
        "kv",
        "loading",
        "model",
        "parts",
        "request",
        "sampling",
        "scheduler",
        "sequence",
    },
    "generate": {"cli", "engine", "errors", "loading", "model", "request", "sampling", "student"},
    "student": {"errors", "parts"},
    "memory": {"cli", "errors", "figures", "graphs", "kv", "loading", "model"},
    "peers": {"errors", "loading", "model"},
    "bench": {
        "cli",
        "engine",
        "errors",
        "figures",
        "kv",
        "loading",
        "model",
        "peers",
        "request",
        "sampling",
        "scheduler",
    },
    "__init__": {"engine", "errors", "request", "sampling"},
}


def part_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module


def dotted(node):
    """`torch.compile` for the expression that reads so."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def violations(source, part):
    """What the rules of this file say against a source text."""
    tree = ast.parse(source)
    for name in imports(tree):
        top, _, rest = name.partition(".")
        if top in FORBIDDEN or name.startswith(("torch._dynamo", "torch._inductor")):
            yield f"imports {name}"
        if top == "tinyengine" and rest:
            target = rest.split(".")[0]
            if target != part and target not in MAY_IMPORT[part]:
                yield f"{part} imports {target}"
    for node in ast.walk(tree):
        compiles = isinstance(node, ast.Attribute) and dotted(node) in ("torch.compile", "torch.compiler")
        if compiles and part != "peers":  # where transformers is compiled, to be compared with at its best
            yield f"uses {dotted(node)}"
        if isinstance(node, ast.ImportFrom) and node.module == "torch" and any(a.name == "compile" for a in node.names):
            yield "imports torch.compile"
        if isinstance(node, ast.Attribute) and dotted(node) in ("torch.load", "pickle.load", "pickle.loads"):
            yield f"unpickles with {dotted(node)}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_the_source_keeps_its_promises(path):
    assert list(violations(path.read_text(encoding="utf-8"), part_of(path))) == []


@pytest.mark.parametrize(
    "source",
    [
        "import triton",
        "import triton.language as tl",
        "from jax import numpy",
        "def f():\n    from flash_attn import flash_attn_func",
        "import torch\nf = torch.compile(g)",
        "@torch.compile\ndef f(): pass",
        "from torch import compile",
        "from torch._inductor import config",
        "from tinyengine.engine import Engine",
        "import tinyengine.scheduler",
        "torch.load('x')",
    ],
)
def test_a_broken_promise_would_be_seen(source):
    assert list(violations(source, "kv"))


def test_every_part_has_its_rule_and_no_circle_is_possible():
    assert {part_of(path) for path in FILES} == set(MAY_IMPORT)
    done = set()
    while len(done) < len(MAY_IMPORT):
        ready = {part for part, needs in MAY_IMPORT.items() if part not in done and needs <= done}
        assert ready, f"a circle among {set(MAY_IMPORT) - done}"
        done |= ready


def test_the_version_stands_in_one_place_and_the_extras_are_there():
    text = (PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8")
    for name in ("notebooks = [", "test = [", "dev = [", 'requires-python = ">=3.10"', '"torch>=2.9"'):
        assert name in text
