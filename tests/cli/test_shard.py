"""`mgtp shard`, `plan` and `verify`: output, JSON keys, exit codes, one-line errors; some as a shell sees them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.crashes import content
from tests.processes import Finished, environment, mgtp, mgtp_here, start
from tests.tiny import write_llama, write_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("model") / "tiny", heads=8, kv=4, dtype="bfloat16")


def failed(run: Finished, *words: str) -> None:
    """Exactly one line of error and at most one of hint, after the lines of the log."""
    lines = [line for line in run.err.splitlines() if line.startswith(("error:", "hint:"))]
    assert [line.split(":")[0] for line in lines] in (["error"], ["error", "hint"])
    assert run.err.splitlines()[-len(lines) :] == lines
    for word in words:
        assert word in lines[0]
    assert run.out == ""


def test_shard_prints_the_folder(tmp_path: Path, model: Path) -> None:
    run = mgtp(tmp_path, "shard", str(model), "--tp-size", "2", "--out", str(tmp_path / "set"))
    assert run.out == f"{tmp_path / 'set'}\n"
    assert "sharding" in run.err and "wrote" in run.err


def test_shard_json(tmp_path: Path, model: Path) -> None:
    out = tmp_path / "set"
    document = json.loads(mgtp(tmp_path, "shard", str(model), "--tp-size", "2", "--out", str(out), "--json").out)
    assert set(document) == {
        "out",
        "written",
        "tp_size",
        "dtype",
        "fingerprint",
        "total_bytes",
        "ranks",
        "notes",
        "seconds",
    }
    assert document["dtype"] == "bfloat16" and document["tp_size"] == 2
    assert document["fingerprint"].startswith("xxh3_128:")
    for rank in document["ranks"]:
        assert set(rank) == {"rank", "file", "bytes"}
        assert (out / rank["file"]).stat().st_size == rank["bytes"]
    plan = (out / "plan.json").stat().st_size
    assert document["total_bytes"] == sum(p.stat().st_size for p in out.iterdir()) - plan


def test_default_folder_is_in_the_current_one(tmp_path: Path, model: Path) -> None:
    import sys

    command = [sys.executable, "-m", "mgtp.cli", "shard", str(model), "--tp-size", "4"]
    run = subprocess.run(command, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, check=True)
    assert run.stdout == "tiny-tp4\n"
    assert (tmp_path / "tiny-tp4" / "plan.json").exists()


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--tp-size", "9"], 2, ["--tp-size 9", "8 q heads"]),
        (["--tp-size", "0"], 2, ["--tp-size"]),
        (["--tp-size", "1000000000"], 2, ["--tp-size 1000000000"]),
        ([], 2, ["--tp-size"]),
        (["--tp-size", "2", "--dtype", "int4"], 2, ["int4"]),
        (["--tp-size", "2", "--shares", "2"], 2, ["--shares 2", "--tp-size is 2"]),
        (["--tp-size", "2", "--threads", "0"], 2, ["--threads"]),
        (["--tp-size", "2", "--revision", "main"], 2, ["--revision main"]),
    ],
)
def test_wrong_options(tmp_path: Path, model: Path, options: list[str], code: int, words: list[str]) -> None:
    failed(mgtp_here("shard", str(model), "--out", str(tmp_path / "set"), *options, code=code), *words)
    assert not (tmp_path / "set").exists()


def test_missing_model(tmp_path: Path) -> None:
    failed(mgtp(tmp_path, "shard", str(tmp_path / "nowhere"), "--tp-size", "2", code=3), "nowhere")
    failed(mgtp(tmp_path, "shard", "no/where", "--tp-size", "2", code=3, HF_HUB_OFFLINE="1"), "no such folder here")


def test_what_is_no_checkpoint_is_named(tmp_path: Path, model: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    for path, what in ((tmp_path / "pipe.gguf", "a named pipe"), (Path("/dev/null"), "a device")):
        run = mgtp_here("shard", str(path), "--tp-size", "2", code=3)
        failed(run, f"{path}: {what}, not a folder")
        assert "pass a checkpoint folder" in run.err
    shutil.copytree(model, tmp_path / "own")
    (tmp_path / "own" / "model.safetensors").unlink()
    os.mkfifo(tmp_path / "own" / "model.safetensors")
    run = mgtp_here("shard", str(tmp_path / "own"), "--tp-size", "2", code=3)
    failed(run, "model.safetensors: a named pipe, not a regular file")
    assert "hint: put the file itself there" in run.err


def test_wrong_settings_name_file_and_key(tmp_path: Path, model: Path) -> None:
    own = shutil.copytree(model, tmp_path / "own")
    config = json.loads((own / "config.json").read_text())
    for key, value in (("num_hidden_layers", None), ("hidden_act", "x"), ("architectures", ["X"]), ("text_config", 3)):
        (own / "config.json").write_text(json.dumps({**config, key: value}))
        failed(mgtp_here("plan", str(own), "--tp-size", "2", code=3), str(own), "config.json", key)


def test_line_breaks_in_names_are_escaped(tmp_path: Path, model: Path) -> None:
    """In errors and in the log: each stays one line, and shows the name as it is."""
    own = shutil.copytree(model, tmp_path / "two\nlines")
    out = str(tmp_path / "a\tsét")
    run = mgtp(tmp_path, "shard", str(own), "--tp-size", "2", "--out", out, PYTHONIOENCODING="ascii")
    assert "two\\nlines for 2 ranks" in run.err and "a\\ts\\xe9t" in run.err
    assert run.out == out.replace("é", "\\xe9") + "\n", "a locale without é is no fault"
    failed(mgtp_here("shard", str(own), "--tp-size", "99", code=2), "99")
    failed(mgtp_here("verify", str(own), code=3), "two\\nlines: not a shard set")


def test_existing_set(tmp_path: Path, model: Path) -> None:
    command = ("shard", str(model), "--tp-size", "2", "--out", str(tmp_path / "set"))
    mgtp_here(*command)
    before = {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in (tmp_path / "set").iterdir()}
    run = mgtp_here(*command)
    assert run.out == f"{tmp_path / 'set'}\n" and "is complete already" in run.err and "wrote" not in run.err
    assert json.loads(mgtp_here(*command, "--json").out)["written"] is False
    after = {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in (tmp_path / "set").iterdir()}
    assert after == before
    assert json.loads(mgtp_here(*command, "--force", "--json").out)["written"] is True


def test_existing_set_of_something_else(tmp_path: Path, model: Path) -> None:
    """What differs is said, whatever it is, and nothing is touched."""
    own = shutil.copytree(model, tmp_path / "own")
    command = ("shard", str(own), "--tp-size", "2", "--out", str(tmp_path / "set"))
    mgtp_here(*command)
    before = content(tmp_path / "set")
    for options, words in (
        (["--tp-size", "4"], "tp size 2, not 4"),
        (["--dtype", "float32"], "dtype bfloat16, not float32"),
        (["--shares", "2,1"], "shares [1, 1], not [2, 1]"),
    ):
        failed(mgtp_here(*command, *options, code=2), "already holds a shard set", words)
    weights = bytearray((own / "model.safetensors").read_bytes())
    weights[-4] ^= 1
    (own / "model.safetensors").write_bytes(weights)
    failed(mgtp_here(*command, code=2), "already holds a shard set: made of other weights")
    weights[-4] ^= 1
    (own / "model.safetensors").write_bytes(weights)
    (own / "generation_config.json").write_text("{}")
    failed(mgtp_here(*command, code=2), "made with another generation_config.json")
    (own / "generation_config.json").unlink()
    assert content(tmp_path / "set") == before
    os.truncate(tmp_path / "set" / "rank-0-of-2.safetensors", 10)
    failed(mgtp_here(*command, code=2), "rank-0-of-2.safetensors", "10 bytes")


def test_unequal_shares(tmp_path: Path, model: Path) -> None:
    mgtp_here("shard", str(model), "--tp-size", "3", "--shares", "4,2,2", "--out", str(tmp_path / "set"))
    plan = json.loads((tmp_path / "set" / "plan.json").read_text())
    assert plan["shares"] == [2, 1, 1]
    assert plan["axes"]["kv_heads"]["ranges"] == [[0, 2], [2, 3], [3, 4]]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_run_continues(tmp_path: Path, number: int, code: int) -> None:
    """One line, the exit code of the signal, a folder that is no shard set, and the same bytes after another run."""
    big = write_llama(tmp_path / "big", hidden=512, ffn=2048, layers=8, vocab=16000)
    command = ("shard", str(big), "--tp-size", "2", "--out")
    out = tmp_path / "set"
    process = start(tmp_path, *command, str(out))
    deadline = time.monotonic() + 60
    while not list(out.glob("rank-*.partial")) and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    if process.returncode == 0:
        pytest.skip("the run was faster than the signal")
    assert process.returncode == code and "Traceback" not in err
    failed(mgtp(tmp_path, "verify", str(out), code=3), "unfinished shard set")
    mgtp(tmp_path, *command, str(out))
    mgtp(tmp_path, *command, str(tmp_path / "fresh"))
    assert content(out) == content(tmp_path / "fresh")


# --- plan -------------------------------------------------------------------------------------------------------------


def plan_json(tmp_path: Path, *arguments: str, code: int = 0) -> dict[str, Any]:
    return json.loads(mgtp_here("plan", *arguments, "--json", code=code).out)


def test_plan_json(tmp_path: Path, model: Path) -> None:
    document = plan_json(tmp_path, str(model), "--tp-size", "3")
    assert set(document) == {
        "model", "is_shard_set", "architecture", "tp_size", "cp_size", "dtype", "shares", "fingerprint", "total_weight_bytes",
        "imbalance", "even_tp_sizes", "axes", "ties", "notes", "ranks", "fit",
    }  # fmt: skip
    assert set(document["ranks"][0]) == {
        "rank", "file", "file_bytes", "weight_bytes", "parts", "kv_bytes_per_token", "window_bytes_per_sequence",
        "state_bytes_per_sequence", "workspace_bytes",
    }  # fmt: skip
    assert document["fingerprint"] is None and document["is_shard_set"] is False
    assert document["even_tp_sizes"] == [1, 2, 4, 8]
    assert list(tmp_path.iterdir()) == []


def test_plan_is_what_shard_writes(tmp_path: Path, model: Path) -> None:
    before = plan_json(tmp_path, str(model), "--tp-size", "3")
    mgtp_here("shard", str(model), "--tp-size", "3", "--out", str(tmp_path / "set"))
    after = plan_json(tmp_path, str(tmp_path / "set"))
    assert after["is_shard_set"] is True and after["fingerprint"]
    for key in ("ranks", "axes", "ties", "shares", "total_weight_bytes", "imbalance"):
        assert before[key] == after[key]
    for rank in after["ranks"]:
        assert (tmp_path / "set" / rank["file"]).stat().st_size == rank["file_bytes"]
    again = plan_json(tmp_path, str(tmp_path / "set"), "--tp-size", "2")
    assert (
        again["is_shard_set"] is False and again["ranks"] == plan_json(tmp_path, str(model), "--tp-size", "2")["ranks"]
    )


def test_plan_needs_a_tp_size_for_a_checkpoint(tmp_path: Path, model: Path) -> None:
    failed(mgtp_here("plan", str(model), code=2), "--tp-size is missing")


def test_plan_fits(tmp_path: Path, model: Path) -> None:
    options = (str(model), "--tp-size", "3", "--device-memory", "24GiB,12GiB,12GiB", "--max-model-len", "200")
    fit = plan_json(tmp_path, *options)["fit"]
    assert set(fit) == {
        "fits", "max_model_len", "longest_context", "max_sequences", "smallest_tp_size", "proposed_shares",
        "proposed_longest_context", "ranks",
    }  # fmt: skip
    assert set(fit["ranks"][0]) == {
        "rank", "device_bytes", "weight_bytes", "workspace_bytes", "context_bytes", "collective_bytes",
        "kept_back_bytes", "cache_bytes", "longest_context", "max_sequences",
    }  # fmt: skip
    assert fit["fits"] is True and fit["proposed_shares"] == [2, 1, 1] and fit["max_model_len"] == 200
    text = mgtp_here("plan", *options).out
    assert "fits: up to 256 tokens in one sequence, " in text and " sequences of 200 tokens at once" in text
    assert "--shares 2,1,1" in text and "set aside on every device: 700 MiB for CUDA, 800 MiB for collectives" in text
    columns = " ".join(text.splitlines()[0].split())
    assert columns.endswith("weights KV/token workspace set aside for the cache of device longest context")


def test_plan_with_less_than_the_whole_context(tmp_path: Path) -> None:
    """No 'or 0 sequences of them': it fits, with a shorter context, which is said."""
    long = write_llama(tmp_path / "long", dtype="bfloat16", max_position_embeddings=1 << 24)
    options = (str(long), "--tp-size", "1", "--device-memory", "1GiB")
    fit = plan_json(tmp_path, *options)["fit"]
    assert fit["fits"] and fit["max_sequences"] == 0 and 0 < fit["longest_context"] < 1 << 24
    line = f"fits: up to {fit['longest_context']} tokens in one sequence, less than the model's own {1 << 24}"
    assert line in mgtp_here("plan", *options).out


def test_plan_does_not_fit(tmp_path: Path, model: Path) -> None:
    """Exit 4, after the table or the document."""
    options = (str(model), "--tp-size", "2", "--device-memory", "512MiB")
    assert plan_json(tmp_path, *options, code=4)["fit"]["fits"] is False
    run = mgtp_here("plan", *options, code=4)
    assert "does not fit: there is room for no sequence at all; no tp size does" in run.out
    assert "error: " in run.err and "hint: " in run.err


@pytest.mark.parametrize("size", ["24", "x", "24GiB,12GiB,1GiB"])
def test_plan_wrong_memory(tmp_path: Path, model: Path, size: str) -> None:
    failed(mgtp_here("plan", str(model), "--tp-size", "2", "--device-memory", size, code=2), "--device-memory")


def test_plan_table(tmp_path: Path, model: Path) -> None:
    lines = mgtp_here("plan", str(model), "--tp-size", "8").out.splitlines()
    assert lines[0].split() == ["rank", "q", "heads", "kv", "heads", "ffn", "vocab", "weights", "KV/token"]
    assert lines[1].split()[:5] == ["0", "1", "1", "16", "40"]
    assert any("copied to several ranks: kv heads" in line for line in lines)


# --- verify -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def written(tmp_path: Path, model: Path) -> Path:
    mgtp_here("shard", str(model), "--tp-size", "2", "--out", str(tmp_path / "set"))
    return tmp_path / "set"


def test_verify(tmp_path: Path, model: Path, written: Path) -> None:
    assert mgtp(tmp_path, "verify", str(written), "--against", str(model)).out.startswith("ok: 2 rank files")
    document = json.loads(mgtp(tmp_path, "verify", str(written), "--json").out)
    assert set(document) == {"ok", "rank", "tp_size", "fingerprint", "bytes", "against", "faults", "seconds"}
    assert document["ok"] is True and document["faults"] == []


def test_verify_names_what_is_damaged(tmp_path: Path, written: Path) -> None:
    path = written / "rank-1-of-2.safetensors"
    changed = bytearray(path.read_bytes())
    changed[-1] ^= 1
    path.write_bytes(changed)
    run = mgtp_here("verify", str(written), code=3)
    assert "rank-1-of-2.safetensors" in run.err and "lm_head.weight" in run.err
    document = json.loads(mgtp_here("verify", str(written), "--json", code=3).out)
    assert [(f["file"], f["tensor"]) for f in document["faults"]] == [(path.name, "lm_head.weight")]


def test_verify_against_another_model(tmp_path: Path, written: Path) -> None:
    other = write_llama(tmp_path / "other", dtype="bfloat16", seed=1)
    run = mgtp_here("verify", str(written), "--against", str(other), code=3)
    failed(run, f"{written} is not {other} cut up: ", "differences, the first: ", "not the checkpoint's values")
    assert "compare with the checkpoint that it was made from" in run.err
    faults = json.loads(mgtp_here("verify", str(written), "--against", str(other), "--json", code=3).out)["faults"]
    assert f"and {len(faults) - 20} more: --json has all" in run.err
    assert sum("not the checkpoint's values" in line for line in run.err.splitlines()) == 20 + 1 < len(faults)


@pytest.fixture
def with_tokenizer(tmp_path: Path, model: Path) -> Path:
    own = shutil.copytree(model, tmp_path / "model")
    write_tokenizer(own)
    mgtp_here("shard", str(own), "--tp-size", "2", "--out", str(tmp_path / "set"))
    return tmp_path / "set"


def test_verify_names_every_missing_file(tmp_path: Path, with_tokenizer: Path) -> None:
    written = with_tokenizer
    for name in ("config.json", "tokenizer.json", "rank-1-of-2.safetensors"):
        (written / name).unlink()
    run = mgtp_here("verify", str(written), code=3)
    failed(run, "3 faults, the first: config.json: no such file")
    for name in ("config.json", "tokenizer.json", "rank-1-of-2.safetensors"):
        assert f"{name}: no such file\n" in run.err
    failed(mgtp_here("generate", str(written), "--prompt", "x", code=3), "3 missing files: config.json")


def test_verify_one_rank_alone(tmp_path: Path, with_tokenizer: Path) -> None:
    """Its file and the plan are enough; what is there of the small files is checked too."""
    written = with_tokenizer
    node = tmp_path / "node"
    node.mkdir()
    for name in ("plan.json", "rank-1-of-2.safetensors"):
        shutil.copy(written / name, node)
    run = mgtp_here("verify", str(node), "--rank", "1")
    assert run.out.startswith("ok: rank-1-of-2.safetensors, ")
    assert "not here, but needed to run the rank: config.json, tokenizer.json" in run.err
    document = json.loads(mgtp_here("verify", str(node), "--rank", "1", "--json").out)
    size = (written / "rank-1-of-2.safetensors").stat().st_size
    assert document["ok"] and document["rank"] == 1 and size - 8192 < document["bytes"] < size
    failed(mgtp_here("verify", str(node), "--rank", "0", code=3), "rank-0-of-2.safetensors: no such file")
    failed(mgtp_here("verify", str(node), "--rank", "2", code=2), "--rank 2", "has 2 ranks")
    failed(mgtp_here("verify", str(node), "--rank", "1", "--against", "x", code=2), "--against")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(written / name, node)
    assert "not here" not in mgtp_here("verify", str(node), "--rank", "1").err
    (node / "tokenizer.json").write_text("{}")
    failed(mgtp_here("verify", str(node), "--rank", "1", code=3), "tokenizer.json: not the file")


def test_verify_truncated_file(tmp_path: Path, written: Path) -> None:
    path = written / "rank-0-of-2.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    failed(mgtp_here("verify", str(written), code=3), "rank-0-of-2.safetensors", "the plan says")


def test_verify_json_without_a_plan_is_a_document_too(tmp_path: Path, written: Path) -> None:
    (written / "plan.json").unlink()
    run = mgtp_here("verify", str(written), "--json", code=3)
    document = json.loads(run.out)
    assert not document["ok"] and document["tp_size"] is None and document["bytes"] == 0
    assert "rank files without plan.json" in document["faults"][0]["reason"]
    (written / "plan.json").mkdir()
    failed(mgtp_here("verify", str(written), code=3), "plan.json: a folder, not a regular file")


def test_moved_set_is_still_right(tmp_path: Path, model: Path, written: Path) -> None:
    shutil.copytree(written, tmp_path / "copy")
    mgtp_here("verify", str(tmp_path / "copy"), "--against", str(model))
