"""The memory ladder as a program: its table, its data, the two pull requests, and the exit code of every mistake."""

import contextlib
import datetime
import io
import itertools
import json
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tinyengine import memory
from tinyengine.figures import written
from tinyengine.graphs.arena import MIB, PoolBytes
from tinyengine.graphs.meter import GraphMemory
from tinyengine.graphs.rungs import BUCKETS, LADDER, block_table_bytes, find_rung, logits_bytes

NAMES = [rung.name for rung in LADDER]
TINY = ("--predict", "--model", "tiny", "--context", "512")
FEW = (*TINY, "--buckets", "1,2,4,48,64")
QUICK = (*FEW, "--rungs", "direct-logits")
PARTS = ("static_bytes", "pool_reserved_bytes", "workspace_bytes", "driver_bytes")
TOP_KEYS = (
    *("device", "torch", "driver", "commit", "date", "preset", "context", "dtype", "block_size", "attention"),
    *("order", "max_graphs", "buckets", "rungs"),
)
RECORDED = Path(__file__).parent.parent / "notebooks" / "recorded"
ROW_KEYS = {"rung", "graphs", *PARTS, "pool_live_bytes", "total_bytes", "predicted"}


@pytest.fixture
def cli(capsys):
    """Run the program in this process; exit code, stdout, stderr."""

    def run(*args):
        code = memory.main(list(args))
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def figures(cli, tmp_path):
    """Run it in this process; what it wrote for --json."""

    def run(*args):
        path = tmp_path / "figures.json"
        code, _, err = cli(*args, "--json", str(path))
        assert code == 0 and err == ""
        return json.loads(path.read_text(encoding="utf-8"))

    return run


def rows_of(out):
    """The table's lines under its head, each as words."""
    lines = out.splitlines()
    table = lines[1 : next(i for i, line in enumerate(lines) if line.startswith("MiB. "))]
    return [line.split() for line in table]


def mib(words):
    return [None if word == "-" else float(word.replace(",", "")) for word in words]


# ---- the ladder ----


def test_the_data_have_exactly_the_documented_keys(figures):
    data = figures(*FEW)
    assert set(data) == set(TOP_KEYS)
    assert [row["rung"] for row in data["rungs"]] == NAMES
    for row in data["rungs"]:
        assert set(row) >= ROW_KEYS and set(row["predicted"]) >= {*PARTS, "total_bytes"}


def test_the_data_say_what_was_asked_and_where_it_ran(figures):
    data = figures(*QUICK, "--max-graphs", "7")
    assert (data["preset"], data["context"], data["block_size"], data["max_graphs"]) == ("tiny", 512, 256, 7)
    assert (data["dtype"], data["attention"], data["buckets"]) == ("float32", "gather", [1, 2, 4, 48, 64])
    assert data["device"] is None and data["driver"] is None, "nothing was measured"
    assert data["torch"] == torch.__version__
    assert abs(datetime.date.fromisoformat(data["date"]) - datetime.date.today()) <= datetime.timedelta(days=1)
    assert "largest" in data["order"]


def test_the_commit_is_that_of_the_checkout(figures):
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=os.path.dirname(__file__), capture_output=True, text=True)
    if git.returncode:
        pytest.skip("not a checkout")
    assert figures(*QUICK)["commit"].removesuffix("-dirty") == git.stdout.strip()


def test_parts_add_up_to_the_total_and_only_a_measurement_fills_the_other_columns(figures):
    for row in figures(*FEW)["rungs"]:
        predicted = row["predicted"]
        assert predicted["total_bytes"] == sum(predicted[part] for part in PARTS)
        assert predicted["pool_live_bytes"] <= predicted["pool_reserved_bytes"]
        assert {row[part] for part in (*PARTS, "pool_live_bytes", "total_bytes")} == {None}


def test_the_table_shows_the_data(cli, tmp_path):
    path = tmp_path / "figures.json"
    code, out, err = cli(*FEW, "--json", str(path))
    rows = json.loads(path.read_text())["rungs"]
    assert code == 0 and err == ""
    head = out.splitlines()[0]
    for word in ("rung", "graphs", "static", "pool reserved", "pool live", "workspace", "driver", "total", "predicted"):
        assert word in head
    above = None
    for words, row in zip(rows_of(out), rows, strict=True):
        predicted, total = row["predicted"], row["predicted"]["total_bytes"]
        assert words[:2] == [row["rung"], str(row["graphs"])]
        parts = ("static_bytes", "pool_reserved_bytes", "pool_live_bytes", "workspace_bytes", "driver_bytes")
        assert mib(words[2:7]) == pytest.approx([predicted[part] / MIB for part in parts], abs=0.051)
        drop = None if above is None else pytest.approx((above - total) / MIB, abs=0.051)
        assert mib(words[7:]) == [None, pytest.approx(total / MIB, abs=0.051), drop, None]
        above = total


def test_a_measured_row_is_compared_with_the_measured_row_above():
    predicted = GraphMemory(2, PoolBytes(2 * MIB, MIB), PoolBytes(4 * MIB, 0), 32 * MIB, MIB)
    rows = []
    for driver in (7 * MIB, 3 * MIB):
        measured = memory.Reading(replace(predicted, driver=driver), [], 1.25)
        rows.append(memory.as_row(find_rung("capture"), predicted, measured))
    words = memory.as_line(rows[1], rows[0]).split()
    assert words == ["capture", "2", *("2.0", "4.0", "0.0", "32.0", "3.0"), *("41.0", "39.0", "4.0", "1.2")]


def test_no_measure_of_the_ladder_costs_a_byte_but_the_drivers_for_a_copy(figures):
    rows = {row["rung"]: row["predicted"] for row in figures(*FEW)["rungs"]}
    ladder = [rows[name]["total_bytes"] - rows[name]["driver_bytes"] for name in NAMES[1:]]
    assert rows["eager"]["total_bytes"] == 0 and ladder == sorted(ladder, reverse=True)
    assert ladder[0] > 3 * ladder[-1]


def test_chosen_rungs_come_in_the_order_asked_for(figures):
    data = figures(*FEW, "--rungs", "direct-logits,eager,capture")
    assert [row["rung"] for row in data["rungs"]] == ["direct-logits", "eager", "capture"]
    assert [row["graphs"] for row in data["rungs"]] == [5, 0, 5]


@pytest.mark.parametrize("name", BUCKETS)
def test_bucket_sets_have_names(figures, name):
    data = figures(*TINY, "--buckets", name, "--rungs", "shared-logits")
    assert tuple(data["buckets"]) == BUCKETS[name] and data["rungs"][0]["graphs"] == len(BUCKETS[name])


def test_a_list_of_buckets_is_sorted_and_a_size_named_twice_counts_once(figures):
    data = figures(*TINY, "--buckets", "8,1,08,2,1", "--rungs", "capture")
    assert data["buckets"] == [1, 2, 8] and data["rungs"][0]["graphs"] == 3


def test_max_graphs_is_the_cap_of_the_rung_that_has_one(figures):
    twenty = ",".join(map(str, range(1, 21)))

    def graphs(*args):
        return [
            row["graphs"] for row in figures(*TINY, "--rungs", "direct-logits,lru", "--buckets", twenty, *args)["rungs"]
        ]

    assert graphs() == [20, 16]
    assert graphs("--max-graphs", "3") == [20, 3]
    assert graphs("--max-graphs", "100") == [20, 20]


def test_the_context_sets_the_width_of_the_block_table(figures):
    pools = [
        figures(*QUICK, "--context", context)["rungs"][0]["predicted"]["pool_reserved_bytes"]
        for context in ("1", "256", "257", "512")
    ]
    assert pools[0] == pools[1] <= pools[2] == pools[3]


def test_a_folder_is_a_model_too(figures, families):
    folder = str(families["llama"][1])
    data = figures(*QUICK, "--model", folder)
    assert data["preset"] == folder and data["dtype"] == "float32" and data["rungs"][0]["predicted"]["total_bytes"] > 0


# ---- mistakes ----

MISTAKES = {
    "no such rung": (["--rungs", "capture,nonsense"], "no rung 'nonsense': choose off, on or one of eager, capture"),
    "no rung at all": (["--rungs", ""], "no rung ''"),
    "two commas among rungs": (["--rungs", "capture,,lru"], "no rung ''"),
    "a comma after the rungs": (["--rungs", "capture,"], "no rung ''"),
    "no such model": (["--model", "no/such/folder"], "no model folder 'no/such/folder'"),
    "no model": (["--model", ""], "config.json"),
    "no buckets": (["--buckets", ""], "buckets must be sglang, vllm, lightllm, or batch sizes"),
    "a bucket of 0": (["--buckets", "0,1"], "buckets must be"),
    "a bucket below 0": (["--buckets=-1"], "buckets must be"),
    "buckets that are none": (["--buckets", "one,two"], "buckets must be"),
    "half a sequence": (["--buckets", "1.5"], "buckets must be"),
    "digits of another script": (["--buckets", "²"], "buckets must be"),
    "two commas among buckets": (["--buckets", "1,,2"], "buckets must be"),
    "a bucket above what a kernel takes": (["--buckets", "65536"], "buckets must be"),
    "a bucket of 5000 digits": (["--buckets", "1" * 5000], "buckets must be"),
    "no context": (["--context", "0"], "--context: must be a whole number of 1 or more"),
    "a context below 0": (["--context", "-5"], "--context: must be a whole number of 1 or more"),
    "a context above the model's": (["--context", "513"], "context 513 is above the model's own 512"),
    "a context that is no number": (["--context", "long"], "--context: must be a whole number of 1 or more"),
    "no graphs": (["--max-graphs", "0"], "--max-graphs: must be a whole number of 1 or more"),
    "fewer than no graphs": (["--max-graphs", "-1"], "--max-graphs: must be a whole number of 1 or more"),
    "half a graph": (["--max-graphs", "1.5"], "--max-graphs: must be a whole number of 1 or more"),
    "no such lesson": (["nonsense"], "invalid choice: 'nonsense'"),
    "no such option": (["--nonsense"], "unrecognized arguments: --nonsense"),
    "a value forgotten": (["--json"], "--json: expected one argument"),
    "an option that SGLang's lesson fixes": (["sglang-8579"], "sglang-8579 has a fixed --model: leave it out"),
    "an option that LightLLM's fixes": (["lightllm-964", "--buckets", "3"], "has a fixed --buckets: leave it out"),
    "LightLLM's context above the model's": (["lightllm-964", "--context", "513"], "above the model's own 512"),
}


@pytest.mark.parametrize("args, complaint", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(capsys, args, complaint):
    try:
        code = memory.main([*TINY, *args])
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    assert code == 2 and out == ""
    assert complaint in err and err.count("\n") == 1 and err.startswith("tinyengine: "), err


@pytest.mark.parametrize(
    "where", ["no/such/folder/f.json", ".", "a\0b", ""], ids=["no folder", "a folder", "NUL", "none"]
)
@pytest.mark.parametrize("lesson", ["ladder", "sglang-8579", "lightllm-964"])
def test_a_file_that_cannot_be_written_is_told_before_anything_is_computed(monkeypatch, capsys, where, lesson):
    def predict(*_):
        raise AssertionError("minutes of work, and then no file")

    monkeypatch.setattr(memory.Predictor, "runner", predict)
    code = memory.main([lesson, *TINY, "--json", where])
    out, err = capsys.readouterr()
    assert code == 2 and out == "" and err.count("\n") == 1 and f"cannot write {where!r}" in err


def test_a_mistake_leaves_the_file_of_an_earlier_run_as_it_was(cli, tmp_path):
    path = tmp_path / "earlier.json"
    path.write_text("{}")
    assert cli(*TINY, "--rungs", "nonsense", "--json", str(path))[0] == 2
    assert path.read_text() == "{}"


def test_a_link_to_nowhere_stays_a_link(tmp_path):
    link, target = tmp_path / "link.json", tmp_path / "target.json"
    link.symlink_to(target)
    with pytest.raises(ZeroDivisionError):
        written(lambda: {"rows": 1 / 0}, str(link))
    assert link.is_symlink() and not target.exists()
    assert written(lambda: {"rows": 1}, str(link)) == json.loads(target.read_text())


def program(*args, **options):
    """It in a process of its own."""
    command = [sys.executable, "-m", "tinyengine.memory", *args]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=120, **options)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_one_line_that_names_no_file_that_was_not_asked_for():
    with open("/dev/full", "wb") as full:
        done = program(*QUICK, stdout=full)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "Traceback" not in done.stderr
    assert "cannot write" in done.stderr and "None" not in done.stderr


# ---- the two pull requests ----


@pytest.fixture(scope="module")
def sglang(tmp_path_factory):
    """The text and the data of `sglang-8579 --predict`."""
    path = tmp_path_factory.mktemp("sglang") / "f.json"
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert memory.main(["sglang-8579", "--predict", "--json", str(path)]) == 0
    return out.getvalue(), json.loads(path.read_text())


def test_the_drops_are_within_5_percent_of_the_closed_forms(sglang):
    data = sglang[1]
    closed = [logits_bytes(BUCKETS["sglang"], 151_552), block_table_bytes(BUCKETS["sglang"], 131_072)]
    assert [drop["rung"] for drop in data["drops"]] == ["#8579", "#8567"]
    assert [drop["closed_form_bytes"] for drop in data["drops"]] == closed
    assert [drop["bytes"] for drop in data["drops"]] == pytest.approx(closed, rel=0.05)


def test_the_drops_are_those_of_the_table(sglang):
    rows = sglang[1]["rungs"]
    kept = [row["predicted"]["static_bytes"] + row["predicted"]["pool_reserved_bytes"] for row in rows]
    assert [a - b for a, b in itertools.pairwise(kept)] == [drop["bytes"] for drop in sglang[1]["drops"]]


def test_what_was_published_stands_beside_it(sglang):
    out, data = sglang
    assert data["published_gb"] == [5.16, 2.89, 0.95]
    for words in ("published 2.27 GB", "published 1.94 GB", "5.16, 2.89, 0.95 GB", "2.24 GiB", "GLM-4.5-Air"):
        assert words in out
    assert data["preset"] == "glm-4.5-air-vocab" and data["table_width"] == 131_072
    assert [row["rung"] for row in data["rungs"]] == ["baseline", "#8579", "#8567"]


@pytest.fixture(scope="module")
def lightllm(tmp_path_factory):
    """The data of `lightllm-964` on a model whose graphs differ in size, by pool and warm-up."""
    path = tmp_path_factory.mktemp("lightllm") / "f.json"
    assert memory.main(["lightllm-964", "--predict", "--model", "glm-4.5-air-vocab", "--json", str(path)]) == 0
    data = json.loads(path.read_text())
    return data, {(run["pool"], run["warmup"]): run for run in data["runs"]}


POOLS, WARMUPS = ("shared", "per graph"), ("captures all", "captures what stays")


def test_four_runs_serve_the_same_batches_under_a_cap_of_16(lightllm):
    data, runs = lightllm
    assert set(runs) == {(pool, warmup) for pool in POOLS for warmup in WARMUPS} and len(data["runs"]) == 4
    assert tuple(data["buckets"]) == BUCKETS["lightllm"] and len(data["buckets"]) == 46
    assert len(data["batches"]) == 300 and 1 <= min(data["batches"]) < max(data["batches"]) <= 256
    assert {run["stats"]["max_graphs"] for run in data["runs"]} == {16}
    assert {run["stats"]["graphs"] for run in data["runs"]} == {16}


@pytest.mark.parametrize("pool", POOLS)
def test_a_warm_up_that_captures_all_captures_in_vain(lightllm, pool):
    everything, what_stays = (lightllm[1][pool, warmup] for warmup in WARMUPS)
    assert [event[0] for event in what_stays["events"][:16]] == ["captured"] * 16
    in_vain = [event for event in everything["events"][: 46 + 30] if event[0] == "evicted"]
    assert len(in_vain) == 46 - 16
    assert everything["stats"]["captures"] > what_stays["stats"]["captures"] >= 16
    assert everything["stats"]["recaptures"] > what_stays["stats"]["recaptures"]


def test_evictions_are_counted_and_each_is_told(lightllm):
    for run in lightllm[0]["runs"]:
        what = [event[0] for event in run["events"]]
        stats = run["stats"]
        assert what.count("captured") == stats["captures"] and what.count("evicted") == stats["evictions"]
        assert stats["captures"] - stats["evictions"] == 16
        assert run["peak_bytes"] >= run["end_bytes"] and run["peak_bytes"] >= run["after_warmup_bytes"] > 0
        assert (
            sum(before - after for name, _, before, after in run["events"] if name == "evicted")
            == (run["given_back_bytes"])
        )


def test_a_shared_pool_gives_nothing_back_and_a_pool_for_each_graph_does(lightllm):
    for (pool, _), run in lightllm[1].items():
        drops = [before - after for name, _, before, after in run["events"] if name == "evicted"]
        assert len(drops) > 20
        assert not any(drops) if pool == "shared" else all(drop > 0 for drop in drops)


def test_the_cap_of_lightllm_is_the_users(figures):
    data = figures("lightllm-964", *TINY, "--max-graphs", "40")
    assert {run["stats"]["max_graphs"] for run in data["runs"]} == {40} and data["max_graphs"] == 40


def test_the_batches_are_the_same_each_time_and_wander():
    batches = memory.serving_trace(256, 300)
    assert batches == memory.serving_trace(256, 300)
    assert all(abs(a - b) <= 26 for a, b in itertools.pairwise(batches)) and len(set(batches)) > 100
    assert all(1 <= batch <= 8 for batch in memory.serving_trace(8, 300))


def test_a_lesson_leaves_the_logging_of_its_process_as_it_was(cli):
    before = logging.getLogger("tinyengine").level
    assert cli("lightllm-964", *TINY)[0] == 0
    assert logging.getLogger("tinyengine").level == before


def test_the_same_question_has_the_same_answer(figures):
    first, again = (figures("lightllm-964", *TINY) for _ in range(2))
    for run in (*first["runs"], *again["runs"]):
        del run["stats"]["capture_seconds"]
    assert first == again


# ---- a large model ----

LIMITED = """
import json, resource, sys, time
from tinyengine.memory import main
started = time.perf_counter()
assert main(sys.argv[1:]) == 0
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
print(json.dumps([time.perf_counter() - started, peak]), file=sys.stderr)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="has no getrusage")
def test_a_laptop_predicts_in_a_minute_and_2_gigabytes_what_an_h200_took(tmp_path):
    """The whole ladder of qwen3-0.6b against the recorded run: static buffers and pools to the byte, totals by 3%."""
    recorded = json.loads((RECORDED / "qwen3-0.6b.h200.json").read_text())
    path = tmp_path / "qwen3.json"
    command = [sys.executable, "-c", LIMITED, "--predict", "--model", "qwen3-0.6b", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    seconds, peak = json.loads(done.stderr.splitlines()[-1])
    assert seconds < 60 and peak < 2e9
    data = json.loads(path.read_text())
    for name in ("preset", "context", "dtype", "attention", "block_size", "buckets", "order"):
        assert data[name] == recorded[name]
    assert recorded["device"] == "NVIDIA H200" and recorded["preset"] == "qwen3-0.6b"
    assert tuple(recorded["buckets"]) == BUCKETS["sglang"]
    for now, then in zip(data["rungs"], recorded["rungs"], strict=True):
        for part in ("graphs", "static_bytes", "pool_reserved_bytes"):
            predicted = now[part] if part == "graphs" else now["predicted"][part]
            assert predicted == then[part], (now["rung"], part)
        assert now["predicted"]["total_bytes"] == pytest.approx(then["total_bytes"], rel=0.03), now["rung"]


# ---- on a GPU ----


@pytest.mark.cuda
def test_what_a_device_takes_is_what_was_predicted(tmp_path):
    """Each row in a process of its own, as a user runs it; static buffers and pools within 2%."""
    path = tmp_path / "measured.json"
    rungs = "one-stream,largest-first,direct-logits"
    args = ("--model", "llama-3.2-1b", "--buckets", "1,4,32", "--rungs", rungs, "--json", str(path))
    done = subprocess.run(
        [sys.executable, "-m", "tinyengine.memory", *args], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    data = json.loads(path.read_text())
    assert data["device"] == torch.cuda.get_device_name() and data["driver"]
    for row in data["rungs"]:
        assert row["graphs"] == 3 and row["total_bytes"] == sum(row[part] for part in PARTS)
        measured, predicted = (part["static_bytes"] + part["pool_reserved_bytes"] for part in (row, row["predicted"]))
        assert measured == pytest.approx(predicted, rel=0.02), row["rung"]
        assert row["capture_seconds"] > 0 and sorted(bucket for bucket, *_ in row["captures"]) == [1, 4, 32]
