"""Checkpoints that are wrong are refused in one line that names what is wrong, and nothing is left that could be run."""

from __future__ import annotations

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
