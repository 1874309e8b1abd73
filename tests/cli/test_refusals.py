"""Checkpoints that are wrong are refused in one line that names what is wrong, and nothing is left that could be run."""

from __future__ import annotations

import json
import shutil

import pytest

from mgtp.cli.app import main


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("bad_missing_shard", ["model-00002-of-"]),
        ("bad_truncated", ["model.safetensors", "1000 bytes"]),
        ("bad_lfs_pointer", ["model.safetensors"]),
        ("bad_index_names_absent_tensor", ["model.layers.9.mlp.up_proj.weight"]),
        ("bad_missing_tensor", ["model.layers.1.self_attn.k_proj.weight"]),
        ("bad_untied_no_head", ["lm_head.weight"]),
    ],
)
def test_bad_checkpoints(name, words, tiny_checkpoint, tmp_path, capsys):
    out = tmp_path / "set"
    assert main(["shard", str(tiny_checkpoint(name)), "--tp-size", "2", "--out", str(out)]) == 3
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-2].startswith("error: ")
    assert lines[-1].startswith("hint: ")
    for word in words:
        assert word in lines[-2]
    assert not out.exists()


@pytest.mark.parametrize("tp_size", [0, 9, 1000, "x", 1.5])
def test_tp_sizes_that_cannot_be(tp_size, tiny_checkpoint, tmp_path, capsys):
    out = tmp_path / "set"
    assert main(["shard", str(tiny_checkpoint("base")), "--tp-size", str(tp_size), "--out", str(out)]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert str(tp_size) in lines[-2]
    assert not out.exists()


def test_ranks_of_two_sets_are_not_mixed(tiny_checkpoint, tmp_path, capsys):
    """Same sizes, same headers but for the fingerprint: the weights are of two models."""
    for name in ("base", "allbias"):
        assert main(["shard", str(tiny_checkpoint(name)), "--tp-size", "2", "--out", str(tmp_path / name)]) == 0
    swapped = [tmp_path / "base" / f"rank-{r}-of-2.safetensors" for r in (0, 1)]
    content = [path.read_bytes() for path in swapped]
    swapped[0].write_bytes(content[1])
    swapped[1].write_bytes(content[0])
    capsys.readouterr()
    assert main(["generate", str(tmp_path / "base"), "--prompt", "x", "--device", "cpu"]) == 3
    assert "rank-0-of-2.safetensors" in capsys.readouterr().err.splitlines()[0]
    for path, right in zip(swapped, content, strict=True):
        path.write_bytes(right[:-1])
    assert main(["generate", str(tmp_path / "base"), "--prompt", "x", "--device", "cpu"]) == 3
    assert "rank-0-of-2.safetensors" in capsys.readouterr().err.splitlines()[0]


def test_a_flipped_bit_in_the_weights_is_found_when_asked(tiny_checkpoint, tmp_path, capsys):
    assert main(["shard", str(tiny_checkpoint("base")), "--tp-size", "2", "--out", str(tmp_path / "set")]) == 0
    file = tmp_path / "set" / "rank-1-of-2.safetensors"
    content = bytearray(file.read_bytes())
    content[-100] ^= 4
    file.write_bytes(content)
    capsys.readouterr()
    for command in (["generate", "--prompt", "x"], ["probe-memory"]):
        arguments = [command[0], str(tmp_path / "set"), *command[1:], "--device", "cpu", "--verify-on-load"]
        assert main(arguments) == 3
        assert "rank-1-of-2.safetensors: lm_head.weight" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--step-timeout", "inf"), "--step-timeout inf must be finite"),
        (("--cp-size", "99"), "--cp-size 99: 256 tokens in blocks of 16 are 16 to share out"),
        (("--cp-size", "1000000000000"), "--cp-size 1000000000000: 256 tokens in blocks of 16 are 16 to share out"),
        (("--prompts", "", "--output", "x"), "--prompts"),
    ],
)
def test_options_that_cannot_be(options, words, tiny_checkpoint, tmp_path, capsys):
    folder = str(tmp_path / "set")
    assert main(["shard", str(tiny_checkpoint("base")), "--tp-size", "1", "--out", folder]) == 0
    capsys.readouterr()
    assert main(["generate", folder, "--device", "cpu", "--prompt", "x", *options]) == 2
    error, hint = capsys.readouterr().err.splitlines()[-2:]
    assert words in error and hint.startswith("hint: ")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--prefills", "1x256"), "--prefills 1x256 and a first token need 257 tokens of context, the model has 256"),
        (
            ("--prompt-tokens", "250", "--output-tokens", "9"),
            "--prompt-tokens 250 and --output-tokens 9 need 259 tokens",
        ),
        (("--batches", "8", "--max-num-seqs", "7"), "--batches 8: with --max-num-seqs 7 fewer run at once"),
        (("--prefills", "1x8", "--cp-sizes", "2,0"), "--cp-sizes '2,0': '0' is not a positive number"),
        (("--batches", "x"), "--batches 'x': 'x' is not a positive number"),
        (("--prefills", "1x8", "--prompt-tokens", "9", "--cp-sizes", "2,99"), "--cp-size 99: 256 tokens"),
    ],
)
def test_what_bench_cannot_measure_is_refused_before_ranks_start(options, words, tiny_checkpoint, tmp_path, capsys):
    folder = str(tmp_path / "set")
    assert main(["shard", str(tiny_checkpoint("base")), "--tp-size", "1", "--out", folder]) == 0
    capsys.readouterr()
    assert main(["bench", folder, "--device", "cpu", *options]) == 2
    error, hint = capsys.readouterr().err.splitlines()[-2:]
    assert words in error and hint.startswith("hint: ")


def test_an_empty_name_is_not_the_current_folder(tiny_checkpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["shard", str(tiny_checkpoint("base")), "--tp-size", "1", "--out", ""]) == 2
    assert "--out" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("family", ["base", "qwen2_qkvbias", "sliding8"])
@pytest.mark.parametrize("nested", [False, True])
def test_a_part_of_heads_is_not_rotated_where_the_family_has_no_such_thing(
    family, nested, tiny_checkpoint, tmp_path, capsys
):
    """The reference ignores the factor there, so that to obey it would be silent nonsense."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_checkpoint(family), folder)
    config = json.loads((folder / "config.json").read_text())
    rope = {"partial_rotary_factor": 0.5}
    config |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, **rope}} if nested else rope
    (folder / "config.json").write_text(json.dumps(config))
    assert main(["shard", str(folder), "--tp-size", "1", "--out", str(tmp_path / "set")]) == 3
    assert "partial_rotary_factor is 0.5" in capsys.readouterr().err


def test_control_characters_do_not_reach_the_terminal(tiny_checkpoint, tmp_path, capsys):
    folder = tmp_path / "model"
    shutil.copytree(tiny_checkpoint("base"), folder)
    (folder / "chat_template.jinja").write_text("{{ raise_exception('a\nb\x1b[31m') }}")
    assert main(["shard", str(folder), "--tp-size", "1", "--out", str(tmp_path / "set")]) == 0
    assert main(["generate", str(tmp_path / "set"), "--device", "cpu", "--chat", "--prompt", "x"]) != 0
    assert "\x1b" not in capsys.readouterr().err
