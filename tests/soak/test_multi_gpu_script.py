"""benchmarks/multi_gpu.sh on ranks of the CPU: one document with every command's outcome."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.soak
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "multi_gpu.sh"
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "hidden_act": "silu", "torch_dtype": "float32",
}  # fmt: skip


def script(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = f"{sys.executable} -m mgtp.cli"
    env = {**os.environ, "MGTP": command, **environment}
    return subprocess.run([str(SCRIPT), *arguments], env=env, capture_output=True, text=True, timeout=240)


@pytest.mark.timeout(300)
def test_every_command_is_in_the_document(tmp_path):
    config, out = tmp_path / "config.json", tmp_path / "out.json"
    config.write_text(json.dumps(CONFIG))
    sizes = {"BATCHES": "1", "PREFILLS": "1x32", "PROMPT": "16", "OUTPUT": "8"}
    run = script(str(out), "2", "cpu", str(config), **sizes)
    assert run.returncode == 0, run.stderr
    document = json.loads(out.read_text())
    assert set(document) == {"date", "commit", "hardware", "runs"} and len(document["commit"]) == 40
    assert [r["arguments"][0] for r in document["runs"]] == ["probe", "bench", "bench"]
    shares = document["runs"][2]["output"]["collectives"]
    assert shares[0]["backend"] == "host" and shares[0]["launches"] == 2 * 2 + 3


@pytest.mark.parametrize("arguments", [(), ("--out",), ("out.json", "two"), ("out.json", "2", "tpu")])
def test_wrong_usage(arguments):
    run = script(*arguments)
    assert run.returncode == 2 and run.stderr.startswith("usage:")
