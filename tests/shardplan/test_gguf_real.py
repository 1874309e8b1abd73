"""Real GGUF files: every tensor bit for bit, the config and the token ids, against transformers and sentencepiece.

SmolLM2 135M (Q4_1, Q8_0) and Gemma 3 270M (Q4_K, Q5_0, Q6_K, Q8_0), from scripts/fetch_models.py [--all].
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, pre_tokenizers

from mgtp.shardplan.sources.gguf import GgufSource, open_gguf
from tests.releases import at_least
from tests.texts import PLAIN, SPECIAL, random_texts

pytestmark = pytest.mark.real_model

TEXTS = [*PLAIN, *SPECIAL, *random_texts()]
ROWS = 1000  # at a time; no multiple of a head


@pytest.fixture(scope="module", autouse=True)
def read_once() -> Iterator[None]:
    """gguf-py's reader, which transformers uses, takes 12 s for a large vocabulary: a file is read for all tests."""
    import gguf

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFReader", cache(gguf.GGUFReader))
        yield


def check_against_transformers(source: GgufSource, folder: Path) -> None:
    """Config and tensors."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    for name, content in source.files.items():
        (folder / name).write_bytes(content)
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    theirs = load_gguf_checkpoint(str(source.path), return_tensors=True, model_to_load=model)
    check_config(config.to_dict(), AutoConfig.for_model(**theirs["config"]).to_dict())
    check_tensors(source, {name: tensor.numpy() for name, tensor in theirs["tensors"].items()})


def check_config(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    not_compared = {"architectures", "_name_or_path", "_model_name_or_path", "unk_token_id"}
    for key in (set(ours) | set(theirs)) - not_compared:
        expected = pytest.approx(theirs[key], rel=1e-6) if key == "rms_norm_eps" else theirs.get(key)
        assert ours.get(key) == expected, key


def check_tensors(source: GgufSource, theirs: dict[str, np.ndarray]) -> None:
    assert set(source.tensors) == set(theirs)
    for name, info in source.tensors.items():
        assert (info.dtype, info.shape) == ("F32", theirs[name].shape)
        flat = theirs[name].reshape(len(theirs[name]), -1)
        for start in range(0, len(flat), ROWS):
            stop = min(start + ROWS, len(flat))
            assert np.array_equal(source.rows(name, start, stop).view("u4"), flat[start:stop].view("u4")), name


def test_smollm2(smollm2: Path, tmp_path: Path) -> None:
    source = open_gguf(smollm2, "smollm2")
    assert source.notes == []
    check_against_transformers(source, tmp_path)


def test_smollm2_heads_in_odd_ranges(smollm2: Path) -> None:
    source, name = open_gguf(smollm2, "smollm2"), "model.layers.7.self_attn.q_proj.weight"
    whole = source.rows(name, 0, 576)
    assert np.array_equal(np.concatenate([source.rows(name, a, min(a + 37, 576)) for a in range(0, 576, 37)]), whole)


def test_smollm2_token_ids(smollm2: Path) -> None:
    """transformers leaves out that the model's own tokenizer cuts numbers into digits; with that, ids are the same."""
    from transformers import AutoTokenizer

    source = open_gguf(smollm2, "smollm2")
    tokenizer = Tokenizer.from_str(source.files["tokenizer.json"].decode())
    reference = AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)
    reference.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in TEXTS:
        assert tokenizer.encode(text).ids == reference(text)["input_ids"], text
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert json.loads(source.files["generation_config.json"])["eos_token_id"] == [2, 0]
    assert source.files["chat_template.jinja"].decode() == reference.chat_template


@pytest.mark.soak
def test_gemma3(gemma3_270m: Path, tmp_path: Path) -> None:
    source = open_gguf(gemma3_270m, "gemma3")
    assert source.notes == []
    check_against_transformers(source, tmp_path)


def test_gemma3_token_ids(gemma3_270m: Path) -> None:
    """sentencepiece is the model's own tokenizer; control tokens, which it does not look for, stand for themselves."""
    source = open_gguf(gemma3_270m, "gemma3")
    tokenizer = Tokenizer.from_str(source.files["tokenizer.json"].decode())
    original = sentencepiece_model(source.path)
    kinds = (original.is_control, original.is_unknown)
    control = {original.id_to_piece(i): i for i in range(original.vocab_size()) if any(kind(i) for kind in kinds)}
    split = re.compile(f"({'|'.join(map(re.escape, control))})")
    for text in TEXTS:
        found = tokenizer.encode(text).ids
        parts = [[control[part]] if part in control else original.encode(part) for part in split.split(text)]
        assert found == [2, *chain(*parts)], text
        assert tokenizer.decode(found[1:], skip_special_tokens=False) == text.replace("▁", " ")
    assert json.loads(source.files["generation_config.json"])["eos_token_id"] == [1, 106]


@pytest.mark.soak
@pytest.mark.skipif(not at_least("transformers", "5.23"), reason="adds no BOS and cuts spaces before words otherwise")
def test_gemma3_token_ids_are_those_of_transformers(gemma3_270m: Path) -> None:
    """But in runs of more than 31 spaces, which it merges instead of taking the longest pieces first."""
    from transformers import AutoTokenizer

    tokenizer = Tokenizer.from_str(open_gguf(gemma3_270m, "gemma3").files["tokenizer.json"].decode())
    reference = AutoTokenizer.from_pretrained(gemma3_270m.parent, gguf_file=gemma3_270m.name)
    for text in TEXTS:
        if " " * 32 not in text:
            assert tokenizer.encode(text).ids == reference(text)["input_ids"], text


def sentencepiece_model(path: Path) -> Any:
    """The SentencePiece model that the file was converted from: its pieces, scores and types, and Gemma's settings."""
    from sentencepiece import SentencePieceProcessor

    from mgtp.shardplan.sources.gguf_header import read_header

    with open(path, "rb") as file:
        metadata, _ = read_header(file, path.stat().st_size, "gemma3")
    pb2: Any = pytest.importorskip("sentencepiece.sentencepiece_model_pb2")
    model = pb2.ModelProto()
    tokens, scores, types = (
        metadata.strings("tokenizer.ggml.tokens"),
        *(metadata.numbers(f"tokenizer.ggml.{name}").tolist() for name in ("scores", "token_type")),
    )
    for text, score, kind in zip(tokens, scores, types, strict=True):
        piece = model.pieces.add()
        piece.piece = text.replace(" ", "▁") if kind == 4 else text
        piece.score, piece.type = score, 2 if text == "<unk>" else kind
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    trainer.model_type, trainer.byte_fallback = 2, True
    trainer.pad_id, trainer.eos_id, trainer.bos_id, trainer.unk_id = range(4)
    trainer.pad_piece, trainer.eos_piece, trainer.bos_piece, trainer.unk_piece = tokens[:4]
    normalizer.name, normalizer.add_dummy_prefix, normalizer.remove_extra_whitespaces = "identity", False, False
    return SentencePieceProcessor(model_proto=model.SerializeToString())
