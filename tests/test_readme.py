"""What README and the model card say can be done, done."""

import re
from pathlib import Path

import pytest

from tinyengine.generate import build_parser

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "weights" / "README.md"]


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_python_example_runs(capsys):
    (example,) = blocks("python")
    scope = {}
    exec(example, scope)
    out = capsys.readouterr().out
    assert len(out) > 100 and scope["stories"][0].text


def test_every_option_shown_exists():
    shown = {option for block in blocks("sh") for option in re.findall(r"tinyengine\.generate.*", block)}
    known = {string for action in build_parser()._actions for string in action.option_strings}
    used = {word for line in shown for word in re.findall(r"(?<!\S)--[a-z-]+", line)}
    assert used and used <= known


def test_the_two_commands_are_one_line_each_and_stand_where_ci_looks_for_them():
    lines = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("python3 -m venv")]
    assert len(lines) == 2
    assert README.split("<!-- test command -->")[1].splitlines()[2] == lines[1]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert "://" in target or (page.parent / target).exists(), target
