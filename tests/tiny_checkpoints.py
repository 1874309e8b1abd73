"""Tiny checkpoints with Hugging Face greedy references, one for each kind of fault that users of such tools report.

Each is a normal Hugging Face folder; its ref.json holds prompt ids, the 24 greedy
token ids of transformers in float32, and the smallest top-1/top-2 margin (so a mismatch is a bug,
not a tie).  Cases whose name starts with bad_ have no reference: the right answer is an error.
"""

import json, os, shutil, struct, sys, torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, decoders, AddedToken
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    PreTrainedTokenizerFast,
    AutoModelForCausalLM,
)

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] not in ['user','assistant'] %}"
    "{{ raise_exception('only user/assistant') }}{% endif %}<|{{ m['role'] }}|>{{ m['content'] }}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tokenizer(path, extra=0):
    # pure byte vocabulary: every non-ASCII character is several tokens, so UTF-8 always splits
    alpha = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(alpha)}
    t = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    t.add_special_tokens([AddedToken(s, special=True) for s in ("<s>", "</s>", "<|user|>", "<|assistant|>")])
    t.add_tokens([f"<extra_{i}>" for i in range(extra)])
    k = PreTrainedTokenizerFast(tokenizer_object=t, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE)
    k.save_pretrained(path)
    return len(k)


BASE = dict(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    vocab_size=320,
    max_position_embeddings=256,
    initializer_range=0.25,
    bos_token_id=256,
    eos_token_id=257,
    tie_word_embeddings=False,
)


def build(out, name, cls=LlamaForCausalLM, cfg=LlamaConfig, prompt_len=40, ref=True, shard=None, extra=0, **kw):
    p = os.path.join(out, name)
    shutil.rmtree(p, ignore_errors=True)
    os.makedirs(p)
    torch.manual_seed(0)
    m = cls(cfg(**{**BASE, **kw})).float().eval()
    with torch.no_grad():
        for n, w in m.named_parameters():
            if n.endswith("bias"):
                w.normal_(0, 0.5)  # zero biases would hide every bias bug
            if "norm" in n:
                w.uniform_(0.5, 1.5)  # constant norms would hide every norm bug
    m.save_pretrained(p, **({"max_shard_size": shard} if shard else {}))
    tokenizer(p, extra)
    if ref:
        reference(p, prompt_len)
    return p


def reference(p, prompt_len=40):
    m = AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32, attn_implementation="eager").eval()
    v = m.config.vocab_size
    ids = [256] + [(7 * i * i + 3 * i) % 250 for i in range(prompt_len - 1)]
    cur, margin, toks = list(ids), 1e9, []
    with torch.no_grad():
        for _ in range(24):  # no cache: recompute, the plainest oracle
            lg = m(torch.tensor([cur]), use_cache=False).logits[0, -1]
            t2 = lg.topk(2).values
            margin = min(margin, float(t2[0] - t2[1]))
            toks.append(int(lg.argmax()))
            cur.append(toks[-1])
    json.dump({"prompt_ids": ids, "greedy_ids": toks, "min_margin": margin}, open(p + "/ref.json", "w"))


def edit(p, **kw):
    c = json.load(open(p + "/config.json"))
    c.update(kw)
    json.dump(c, open(p + "/config.json", "w"), indent=1)


def first(p):
    return os.path.join(p, sorted(f for f in os.listdir(p) if f.endswith(".safetensors"))[0])


R = dict(rope_theta=10000.0)
CASES = {
    "base": dict(),
    "heads28_kv4": dict(num_attention_heads=28, hidden_size=224),  # Qwen2-7B's head counts
    "heads12_kv2": dict(num_attention_heads=12, num_key_value_heads=2, hidden_size=96),  # Qwen2-1.5B's head counts
    "mqa_kv1": dict(num_key_value_heads=1),
    "vocab331": dict(vocab_size=331),
    "tied": dict(tie_word_embeddings=True),
    "tied_vocab331": dict(tie_word_embeddings=True, vocab_size=331),
    "headdim": dict(num_attention_heads=4, num_key_value_heads=2, head_dim=32),  # 4*32 != 64
    "allbias": dict(attention_bias=True, mlp_bias=True),
    "qwen2_qkvbias": dict(cls=Qwen2ForCausalLM, cfg=Qwen2Config),
    "rope_llama3": dict(
        prompt_len=120,
        rope_parameters=dict(
            R, rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    "rope_dynamic_short": dict(
        prompt_len=20, max_position_embeddings=64, rope_parameters=dict(R, rope_type="dynamic", factor=4.0)
    ),
    "sliding8": dict(cls=MistralForCausalLM, cfg=MistralConfig, prompt_len=60, sliding_window=8),
    "multishard": dict(shard="60KB"),
    "long32k": dict(max_position_embeddings=32768),
}  # fmt: skip


def make(out, name):
    """Write case `name` (and the case it is derived from) under `out`."""
    if name in CASES:
        return build(out, name, **CASES[name])
    source, change = DERIVED[name]
    if not os.path.exists(os.path.join(out, source)):
        make(out, source)
    path = os.path.join(out, name)
    shutil.copytree(os.path.join(out, source), path)
    if name.startswith("bad_"):
        os.remove(path + "/ref.json")
    change(path)
    return path


def _old_rope_keys(p):
    c = json.load(open(p + "/config.json"))
    r = c.pop("rope_parameters")
    c["rope_theta"] = r.pop("rope_theta")
    r["type"] = r.pop("rope_type")
    c["rope_scaling"] = r
    json.dump(c, open(p + "/config.json", "w"), indent=1)


def _overlay(p):
    """The index sends one name to a new file, the old copy (all 9.0) stays in the old file."""
    ix = json.load(open(p + "/model.safetensors.index.json"))
    k = "model.layers.0.mlp.down_proj.weight"
    old = load_file(os.path.join(p, ix["weight_map"][k]))
    good = old[k].clone()
    old[k] = torch.full_like(good, 9.0)
    save_file(old, os.path.join(p, ix["weight_map"][k]), metadata={"format": "pt"})
    save_file({k: good}, p + "/model-overlay.safetensors", metadata={"format": "pt"})
    ix["weight_map"][k] = "model-overlay.safetensors"
    json.dump(ix, open(p + "/model.safetensors.index.json", "w"))


def _missing_shard(p):
    os.remove(os.path.join(p, sorted(x for x in os.listdir(p) if x.endswith("tensors"))[1]))


def _truncated(p):
    os.truncate(first(p), os.path.getsize(first(p)) - 1000)


def _lfs_pointer(p):
    open(first(p), "w").write("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")


def _absent_tensor(p):
    ix = json.load(open(p + "/model.safetensors.index.json"))
    ix["weight_map"]["model.layers.9.mlp.up_proj.weight"] = sorted(set(ix["weight_map"].values()))[0]
    json.dump(ix, open(p + "/model.safetensors.index.json", "w"))


def _without(tensor):
    def change(p):
        w = load_file(first(p))
        del w[tensor]
        save_file(w, first(p), metadata={"format": "pt"})

    return change


DERIVED = {
    "rope_llama3_oldkeys": ("rope_llama3", _old_rope_keys),
    "overlay_index": ("multishard", _overlay),
    "bad_missing_shard": ("multishard", _missing_shard),
    "bad_truncated": ("base", _truncated),
    "bad_lfs_pointer": ("base", _lfs_pointer),
    "bad_index_names_absent_tensor": ("multishard", _absent_tensor),
    "bad_missing_tensor": ("base", _without("model.layers.1.self_attn.k_proj.weight")),
    "bad_untied_no_head": ("base", _without("lm_head.weight")),
}
