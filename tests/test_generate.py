"""The command line, as a user meets it: what goes to stdout and stderr, and the exit code of every mistake."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tinyengine.generate import main


@pytest.fixture(scope="module")
def folder(families):
    return str(families["llama"][1])


@pytest.fixture
def cli(folder, capsys):
    """Run the program in this process; exit code, stdout, stderr."""

    def run(*args, model=folder):
        code = main(["--model", model, "--device", "cpu", "--max-tokens", "8", *args])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def spawn(*args, **options):
    """The program in a process of its own."""
    command = [sys.executable, "-m", "tinyengine.generate", "--device", "cpu", *args]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    return subprocess.Popen(command, **{**pipes, **options})


def one_line(err):
    assert err.startswith("tinyengine: ") and err.count("\n") == 1 and "Traceback" not in err, err
    return err


def test_a_lone_prompt_streams_its_text_and_ends_with_one_line_of_statistics(cli):
    code, out, err = cli("Once upon", "--temperature", "0")
    assert code == 0 and out.startswith("Once upon") and out.endswith("\n")
    assert err.count("\n") == 1
    for word in ("TTFT", "prefill 9 tokens", "decode 7 tokens", "/s", "KV blocks 1 of"):
        assert word in err


def test_quiet_leaves_stderr_empty(cli):
    assert cli("Once", "--quiet")[2] == ""
    assert cli("Once", "upon", "--quiet")[2] == ""


def test_json_has_one_object_a_line_with_the_promised_keys(cli, folder):
    code, out, err = cli("Once", "upon a", "--json", "--temperature", "0")
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and [row["prompt"] for row in rows] == ["Once", "upon a"]
    for row in rows:
        assert set(row) == {
            "prompt",
            "text",
            "token_ids",
            "finish_reason",
            "prompt_tokens",
            "completion_tokens",
        }
        assert row["finish_reason"] in ("stop", "length")
        assert row["completion_tokens"] == len(row["token_ids"]) <= 8
    assert rows[0]["prompt_tokens"] == 4
    assert "2/2" in err, "a batch has a progress bar"


def test_a_seed_repeats_the_output_and_another_does_not(cli):
    outs = [cli("Once", "--json", "--temperature", "2", "--seed", seed)[1] for seed in ("1", "1", "2")]
    assert outs[0] == outs[1] != outs[2]


def test_a_file_is_served_as_a_batch_in_order(cli, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("one\n\n  \ntwo\r\nthree 龙\n", encoding="utf-8-sig")
    code, out, _ = cli("zero", "--file", str(path), "--json")
    assert code == 0
    assert [json.loads(line)["prompt"] for line in out.splitlines()] == ["zero", "one", "two", "three 龙"]


def test_a_batch_as_text_numbers_its_answers(cli):
    code, out, _ = cli("one", "two", "--temperature", "0")
    assert code == 0 and "[1] one" in out and "[2] two" in out


def test_standard_input_is_a_file_too(folder):
    process = spawn("--model", folder, "--file", "-", "--json", "--max-tokens", "2")
    out, _ = process.communicate(b"one\ntwo\n", timeout=60)
    assert process.returncode == 0 and len(out.splitlines()) == 2


def test_in_a_batch_the_others_are_served_and_the_bad_row_says_why(cli):
    code, out, _ = cli("good", "", "x" * 600, "also good", "\udcff", "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 2 and len(rows) == 5
    assert [sorted(row) == ["error", "prompt"] for row in rows] == [False, True, True, False, True]
    assert "empty" in rows[1]["error"] and "600 tokens" in rows[2]["error"] and "Unicode" in rows[4]["error"]


def test_in_a_batch_as_text_the_bad_row_is_told_on_stderr(cli):
    code, out, err = cli("good", "", "--quiet")
    assert code == 2 and "[1] good" in out and "prompt 2: the prompt is empty" in one_line(err)


@pytest.mark.parametrize(
    "args, complaint",
    [
        ([], "no prompt"),
        ([""], "empty"),
        (["x" * 600], "600 tokens"),
        (["x", "--temperature", "-1"], "temperature"),
        (["x", "--temperature", "nan"], "temperature"),
        (["x", "--temperature", "warm"], "--temperature: invalid float value: 'warm'"),
        (["x", "--top-p", "0"], "top_p"),
        (["x", "--top-k", "-7"], "top_k"),
        (["x", "--top-k", "1.5"], "--top-k: invalid int value"),
        (["x", "--max-tokens", "0"], "max_tokens"),
        (["x", "--seed", str(2**70)], "seed"),
        (["x", "--device", "tpu"], "choose auto, cpu, cuda or mps"),
        (["x", "--dtype", "int4"], "choose auto, float32"),
        (["x", "--file", "no/such/file"], "No such file"),
        (["x", "--file", "."], "directory"),
        (["x", "--file", ""], "No such file"),
        (["x", "--file", "a\0b"], "null"),
        (["x", "--top-k", "9" * 20], "top_k"),
        (["-hello there"], "goes after --"),
        (["x", "--nonsense"], "unrecognized arguments: --nonsense"),
        (["x", "--chat"], "no chat template"),
    ],
    ids=lambda value: " ".join(value)[:30] if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_and_exit_code_2(cli, args, complaint):
    code, out, err = cli(*args)
    assert code == 2 and out == "" and complaint in one_line(err)


def test_a_model_that_is_not_there_is_one_line(cli):
    code, _, err = cli("x", model="no/such/folder")
    assert code == 2 and "no model folder 'no/such/folder'" in one_line(err)


@pytest.mark.parametrize("name", ["a" * 300, "new\nline"], ids=["too long", "two lines"])
def test_an_impossible_folder_is_one_line(cli, name):
    code, _, err = cli("x", model=name)
    assert code == 2 and "no model folder" in one_line(err)


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings"])
def test_a_model_too_large_for_the_machine_is_one_line(cli, folder, tmp_path, key):
    import shutil

    shutil.copytree(folder, tmp_path / "huge")
    path = tmp_path / "huge" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: 2**44, "head_dim": 16}))
    code, _, err = cli("x", model=str(tmp_path / "huge"))
    assert code == 2 and one_line(err)


def test_only_line_ends_end_a_prompt(cli, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes("a\u2028b\x0cc\x85d\nnext".encode())
    assert len(cli("--file", str(path), "--json")[1].splitlines()) == 2


def test_a_file_that_is_not_text_is_one_line(cli, tmp_path):
    path = tmp_path / "noise"
    path.write_bytes(b"\xff\xfe\x00\x80")
    code, _, err = cli("--file", str(path))
    assert code == 2 and "not UTF-8" in one_line(err)


def test_a_damaged_model_is_one_line(cli, folder, tmp_path):
    import shutil

    copy = tmp_path / "damaged"
    shutil.copytree(folder, copy)
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    code, _, err = cli("x", model=str(copy))
    assert code == 2 and "model.safetensors" in one_line(err)


def test_a_preset_talks_in_bytes(cli):
    code, out, _ = cli("x", "--json", model="tiny")
    assert code == 0 and json.loads(out)["prompt_tokens"] == 1


def test_a_terminal_that_cannot_show_a_character_still_gets_its_story(folder):
    process = spawn("--model", folder, "--max-tokens", "4", "龙", env={**os.environ, "PYTHONIOENCODING": "latin-1"})
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and out.startswith(b"?") and b"Traceback" not in err


def test_a_reader_that_goes_away_is_one_line(folder):
    process = spawn("--model", folder, "--max-tokens", "400", "--temperature", "2", "--quiet", "x")
    process.stdout.read(1)
    process.stdout.close()
    err = process.stderr.read().decode()
    assert process.wait(60) == 2 and "cannot write the output" in one_line(err)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("args", [["x"], ["x", "y", "--json"]], ids=["stream", "batch"])
def test_a_full_disk_is_one_line(folder, args):
    with open("/dev/full", "wb") as full:
        process = spawn("--model", folder, "--max-tokens", "4", "--quiet", *args, stdout=full)
        err = process.stderr.read().decode()
    assert process.wait(60) == 2 and "cannot write the output" in one_line(err)


@pytest.mark.skipif(sys.platform == "win32", reason="closes descriptors in a shell")
@pytest.mark.parametrize(
    "redirection, code, complaint",
    [
        (">&-", 2, "standard output is closed"),
        ("2>&-", 0, ""),
        ("2>/dev/full", 2, ""),
        ("--file - <&-", 2, "standard input is closed"),
    ],
)
def test_closed_streams_end_in_no_traceback(folder, redirection, code, complaint):
    for prompts in ("x", "x y --json"):
        command = f"{sys.executable} -m tinyengine.generate --model '{folder}' --max-tokens 2 {prompts} {redirection}"
        done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
        assert done.returncode == code and "Traceback" not in done.stdout + done.stderr
        assert complaint in done.stderr and "tinyengine:" not in done.stdout


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
@pytest.mark.parametrize("module", ["torch.types", "torch.nn.functional", "tinyengine.engine"])
def test_ctrl_c_while_loading_exits_130(endless, module):
    """Python tells each module once it is imported; the last one is the engine, and the model comes after it."""
    environment = os.environ | {"PYTHONPROFILEIMPORTTIME": "1"}
    process = spawn("--model", endless, "--max-tokens", "90000", "--quiet", "x", env=environment)
    err = b""
    while not err.rstrip().endswith(f" {module}".encode()):
        line = process.stderr.readline()
        assert line, err
        err += line
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=60)
    assert process.returncode == 130 and b"Traceback" not in err + rest


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
def test_ctrl_c_after_the_end_changes_nothing(folder):
    process = spawn("--model", folder, "--max-tokens", "3", "--temperature", "0", "x")
    seen = b""
    while b"KV blocks" not in seen:  # the statistics are the last thing that is written
        seen += process.stderr.read(1)
    time.sleep(0.05)  # Python is taking itself down
    for _ in range(200):
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            time.sleep(0.005)
    out, err = process.communicate(timeout=60)
    assert process.returncode in (0, 130) and b"Traceback" not in err
    assert out.startswith(b"x") and out.endswith(b"\n")


@pytest.fixture
def chatty(folder, tmp_path):
    """A model with a chat template, which refuses one word."""
    import shutil

    shutil.copytree(folder, tmp_path / "chat")
    template = (
        "{% if messages[0].content == 'no' %}{{ raise_exception('not\\nthat') }}{% endif %}<{{ messages[0].content }}>"
    )
    (tmp_path / "chat" / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return str(tmp_path / "chat")


def test_chat_wraps_the_prompt_and_shows_only_the_answer(cli, chatty):
    code, out, _ = cli("--chat", "hello", "--json", model=chatty)
    row = json.loads(out)
    assert code == 0 and row["prompt"] == "hello" and row["prompt_tokens"] == len("<hello>")
    assert not cli("--chat", "hello", "--temperature", "0", model=chatty)[1].startswith("hello")


def test_a_chat_template_that_refuses_one_prompt_fails_that_row_alone(cli, chatty):
    code, out, _ = cli("--chat", "yes", "no", "--json", "--quiet", model=chatty)
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 2 and "text" in rows[0] and "refused" in rows[1]["error"]
    assert "not that" in one_line(cli("--chat", "no", model=chatty)[2])


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    """A model that never stops and takes long: no eos, and room for many tokens."""
    from conftest import byte_tokenizer_json, hf_model

    path = tmp_path_factory.mktemp("endless")
    hf_model("llama", num_hidden_layers=12, max_position_embeddings=100_000, eos_token_id=None).save_pretrained(path)
    (path / "tokenizer.json").write_text(byte_tokenizer_json())
    return str(path)


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
def test_ctrl_c_keeps_the_text_so_far_and_exits_130(endless):
    process = spawn("--model", endless, "--max-tokens", "90000", "--quiet", "Once upon")
    head = process.stdout.read(12)
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=60)
    assert process.returncode == 130 and b"Traceback" not in err
    assert (head + rest).startswith(b"Once upon") and rest.endswith(b"\n")


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
def test_ctrl_c_in_a_batch_keeps_every_row(endless):
    process = spawn("--model", endless, "--max-tokens", "90000", "--json", "one", "two")
    seen = b""
    while b"0/2" not in seen:  # the progress bar: the batch has begun
        seen += process.stderr.read(1)
    time.sleep(2.0)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    rows = [json.loads(line) for line in out.splitlines()]
    assert process.returncode == 130 and b"Traceback" not in err
    assert [row["finish_reason"] for row in rows] == ["abort", "abort"]
    assert all(row["completion_tokens"] > 0 for row in rows)
