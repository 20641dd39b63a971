"""What README and the model card say can be done, done."""

import ast
import re
from pathlib import Path

import pytest

from tinyengine.generate import build_parser

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "weights" / "README.md", *sorted((ROOT / "notebooks").rglob("*.md"))]


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_python_example_runs(capsys):
    (example,) = blocks("python")
    scope = {}
    exec(example, scope)
    out = capsys.readouterr().out
    assert len(out) > 100 and scope["stories"][0].text


def test_no_placeholder_is_left():
    for page in PAGES:
        assert not re.search(r"^[A-Z]{4,}$|TODO|TBD|XXX", page.read_text(encoding="utf-8"), re.MULTILINE), page


def test_every_option_shown_exists():
    shown = {option for block in blocks("sh") for option in re.findall(r"tinyengine\.generate.*", block)}
    known = {string for action in build_parser()._actions for string in action.option_strings}
    used = {word for line in shown for word in re.findall(r"(?<!\S)--[a-z-]+", line)}
    assert used and used <= known


def test_the_two_commands_are_one_line_each_and_stand_where_ci_looks_for_them():
    section = README.split("## Run it")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("python3 -m venv")]
    assert len(lines) == 2
    assert README.split("<!-- test command -->")[1].splitlines()[2] == lines[1]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert "://" in target or (page.parent / target).exists(), target


def table_of_files():
    """The table under "How it is built" as module names in its order; a bare name shares its row's folder."""
    modules = []
    for line in README.split("## How it is built")[1].split("\n## ")[0].splitlines():
        if line.startswith("| `"):
            names = re.findall(r"`([\w/]+)\.py`", line.split("|")[1])
            folder = names[0].rpartition("/")[0]
            modules += [name if "/" in name or not folder else f"{folder}/{name}" for name in names]
    return ["tinyengine." + name.replace("/", ".") for name in modules]


def test_the_table_of_files_is_complete_and_imports_point_down_in_it():
    place = {module: i for i, module in enumerate(table_of_files())}
    files = [path for path in (ROOT / "tinyengine").rglob("*.py") if path.name != "__init__.py"]
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in files}
    assert set(place) == set(modules)
    for module, path in modules.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tinyengine"):
                assert place[module] < place[node.module], f"{module} imports {node.module}"
