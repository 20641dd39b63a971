"""The benchmark runs, tells no impossible figure, and refuses what it cannot time."""

import json

import pytest

from tinyengine.bench import main


def test_the_table_and_its_data_agree(families, capsys):
    pytest.importorskip("transformers")
    folder = str(families["llama"][1])
    code = main(
        ["cpu", "--model", folder, "--batch", "1", "3", "--prompt-len", "5", "--new-tokens", "4", "--repeats", "1"]
    )
    *table, last = capsys.readouterr().out.splitlines()
    data = json.loads(last)
    assert code == 0 and [row["batch"] for row in data["rows"]] == [1, 3]
    for line, row in zip([x for x in table if x.startswith("| ") and "batch" not in x], data["rows"], strict=True):
        assert f"| {row['tinyengine_ms']:.2f} | {row['transformers_ms']:.2f} |" in line
        assert row["products_ms"] > 0


@pytest.mark.parametrize("args", [["--batch", "0"], ["--new-tokens", "1"], ["--repeats", "x"]], ids=" ".join)
def test_nonsense_is_refused(args, capsys):
    assert main(["cpu", *args]) == 2
    assert "must be a whole number" in capsys.readouterr().err


def test_a_preset_has_no_folder_to_compare_with(capsys):
    pytest.importorskip("transformers")
    assert main(["cpu", "--model", "tiny"]) == 2
    assert "give a model folder" in capsys.readouterr().err
