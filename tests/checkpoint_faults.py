"""Ways to spoil a checkpoint, each with the finding that it must give."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.checkpoints import ROWS, edit, tensors, truncate

Spoil = Callable[[Path], None]
CONFIG, TOKENIZER, INDEX = "config.json", "tokenizer.json", "model.safetensors.index.json"


SHARDED = {"shard_size": "200KB"}


def config(**changes: Any) -> Spoil:
    """Sets fields of config.json; None deletes one."""

    def change(value: dict) -> None:
        for name, new in changes.items():
            if new is None:
                value.pop(name)
            else:
                value[name] = new

    return edit(CONFIG, change)


def both(*spoils: Spoil) -> Spoil:
    def spoil(folder: Path) -> None:
        for one in spoils:
            one(folder)

    return spoil


def rename(old: str, new: str) -> Spoil:
    def change(content: dict) -> None:
        names = [name for name in content if old in name]
        assert names, f"no tensor is called {old}"
        for name in names:
            content[name.replace(old, new)] = content.pop(name)

    return tensors(change)


def drop(*names: str) -> Spoil:
    def change(content: dict) -> None:
        for name in names:
            del content[name]

    return tensors(change)


def write(file: str, text: str | bytes) -> Spoil:
    return lambda folder: (folder / file).write_bytes(text if isinstance(text, bytes) else text.encode())


def delete(pattern: str, count: int = 100) -> Spoil:
    def spoil(folder: Path) -> None:
        found = sorted(folder.glob(pattern))[-count:]
        assert found
        for path in found:
            path.unlink()

    return spoil


class Exploding:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.touch, (self.path,)


def only_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Exploding(folder / "EXPLODED")))


def tokenizer_code(folder: Path) -> None:
    code = f"from pathlib import Path\nPath({str(folder / 'EXPLODED')!r}).touch()\nclass Own: pass\n"
    (folder / "own.py").write_text(code)
    edit("tokenizer_config.json", lambda c: c.update(auto_map={"AutoTokenizer": ["own.Own", None]}))(folder)


def model_code(folder: Path) -> None:
    tokenizer_code(folder)
    edit("tokenizer_config.json", lambda c: c.pop("auto_map") and None)(folder)
    auto = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}
    config(model_type="own_hybrid", auto_map=auto)(folder)


def move_in_index(folder: Path) -> None:
    def change(index: dict) -> None:
        places = index["weight_map"]
        name = next(name for name, file in places.items() if file != min(places.values()))
        places[name] = min(places.values())

    edit(INDEX, change)(folder)


def unlist(folder: Path) -> None:
    edit(INDEX, lambda index: index["weight_map"].pop("model.norm.weight") and None)(folder)


def swap(values: list, a: int, b: int) -> None:
    values[a], values[b] = values[b], values[a]


def permuted(field: str, a: int, b: int) -> Spoil:
    return edit(CONFIG, lambda c: swap(c[field], a, b))


#: Name -> (family, how to spoil it, the code that must be found, arguments of the checkpoint).
ALONE: dict[str, tuple] = {
    # Files.
    "no config": ("qwen3_5_text", delete(CONFIG), "HS002"),
    "half a config": ("bamba", lambda f: (f / CONFIG).write_bytes((f / CONFIG).read_bytes()[:99]), "HS003"),
    "a list for a config": ("lfm2", write(CONFIG, "[]"), "HS003"),
    "config in another encoding": (
        "lfm2",
        write(CONFIG, '{"model_type": "lfm2", "x": "\xe9"}'.encode("latin-1")),
        "HS003",
    ),
    "a deep generation config": ("jamba", write("generation_config.json", "[" * 100_000), "HS003"),
    "index that is not JSON": ("qwen3_5_text", write(INDEX, "{,}"), "HS003", SHARDED),
    "no weights": ("zamba2", delete("*.safetensors"), "HS004"),
    "weights as pickle": ("olmo_hybrid", only_pickle, "HS005"),
    "header cut short": ("nemotron_h", truncate("*.safetensors", lambda header, size: header - 50), "HS006"),
    "a file of 3 bytes": ("mamba2", truncate("*.safetensors", lambda header, size: 3), "HS006"),
    "no safetensors at all": ("mamba", write("model.safetensors", b"PK\x03\x04" * 100), "HS006"),
    "tensors cut short": ("granitemoehybrid", truncate("*.safetensors", lambda header, size: size - 4), "HS007"),
    "a shard cut short": ("qwen3_5_text", truncate("*-00002-*", lambda header, size: header + 9), "HS007", SHARDED),
    "a shard missing": ("qwen3_next", delete("model-00002-*"), "HS008", SHARDED),
    "a tensor in another shard": ("qwen3_5_text", move_in_index, "HS009", SHARDED),
    "a tensor that is not listed": ("qwen3_5_text", unlist, "HS009", SHARDED),
    "a shard outside the folder": (
        "qwen3_5_text",
        edit(INDEX, lambda index: index["weight_map"].update({"model.norm.weight": "../../etc/passwd"})),
        "HS009",
        SHARDED,
    ),
    "shards without an index": ("qwen3_5_text", delete(INDEX), "HS009", SHARDED),
    "a Git LFS pointer": (
        "falcon_h1",
        write("model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n"),
        "HS013",
    ),
    # Layers and tensors.
    "layer_types lost": ("lfm2", config(layer_types=None), "HS101"),
    "layer_types lost, the default fits": ("qwen3_5_text", config(layer_types=None), "HS102"),
    "layer_types permuted": ("qwen3_5_text", permuted("layer_types", 0, 3), "HS101"),
    "layer_types of KDA permuted": ("kimi_linear", permuted("layer_types", 1, 3), "HS101"),
    "layers_block_type permuted": ("nemotron_h", permuted("layers_block_type", 1, 2), "HS101"),
    "experts where a mixer is": ("nemotron_h", permuted("layers_block_type", 0, 1), "HS101"),
    "hybrid layers of Zamba2 moved": ("zamba2", permuted("layers_block_type", 3, 4), "HS101"),
    "attn_layer_offset changed": ("jamba", config(attn_layer_offset=1), "HS101"),
    "attn_layer_indices changed": ("bamba", config(attn_layer_indices=[1]), "HS101"),
    "attn_layer_indices lost": ("bamba", config(attn_layer_indices=None), "HS101"),
    "block_types turned": ("recurrent_gemma", config(block_types=["attention", "recurrent", "recurrent"]), "HS101"),
    "a plain transformer's config": (
        "granitemoehybrid",
        config(layer_types=["full_attention"] * 4),
        "HS101",
    ),
    "one layer type too few": ("granitemoehybrid", edit(CONFIG, lambda c: c["layer_types"].pop() and None), "HS104"),
    "two sequences": (
        "qwen3_5_text",
        config(layers_block_type=["attention", "mamba", "mamba", "mamba"]),
        "HS104",
    ),
    "unknown layer type": ("olmo_hybrid", edit(CONFIG, lambda c: c["layer_types"].__setitem__(1, "linaer")), "HS105"),
    "unknown letter": ("nemotron_h", config(layers_block_type=None, hybrid_override_pattern="MX*-M"), "HS105"),
    "a layer index beyond the last": ("bamba", config(attn_layer_indices=[9]), "HS105"),
    "a billion layers": ("mamba", config(num_hidden_layers=10**9), "HS105"),
    "one layer fewer in the config": (
        "qwen3_5_text",
        both(config(num_hidden_layers=3), edit(CONFIG, lambda c: c["layer_types"].pop() and None)),
        "HS103",
    ),
    "a layer under another number": ("lfm2", rename("layers.2.", "layers.7."), "HS103"),
    "a layer dropped": (
        "jamba",
        tensors(lambda t: [t.pop(n) for n in list(t) if ".layers.1." in n] and None),
        "HS103",
    ),
    "a tensor renamed": ("qwen3_5_text", rename("1.linear_attn.A_log", "1.linear_attn.a_log"), "HS106"),
    "a tensor dropped": ("falcon_h1", drop("model.layers.2.mamba.D"), "HS106"),
    "a norm dropped": ("minimax+linear_first", drop("model.layers.3.post_attention_layernorm.weight"), "HS106"),
    "an expert dropped": ("qwen3_next", drop("model.layers.1.mlp.experts.2.up_proj.weight"), "HS106"),
    "a tensor of a recurrence dropped": ("kimi_linear", drop("model.layers.0.self_attn.f_a_proj.weight"), "HS106"),
    "the final norm dropped": ("recurrent_gemma", drop("model.final_norm.weight"), "HS106"),
    "a bias that no field builds": (
        "qwen3_5_text",
        tensors(lambda t: t.update({"model.layers.3.self_attn.q_proj.bias": torch.zeros(128)})),
        "HS107",
    ),
    "an attention beside a recurrence": (
        "falcon_h1",
        config(mamba_conv_bias=False),
        "HS107",
    ),
    "another width": ("jamba", config(intermediate_size=64), "HS108"),
    "another state size": ("mamba2", config(state_size=16), "HS108"),
    "a transposed tensor": (
        "lfm2",
        tensors(lambda t: t.update({k: t[k].T.contiguous() for k in ["model.layers.0.conv.in_proj.weight"]})),
        "HS108",
    ),
    "vocab_size of another tokenizer": ("qwen3_5_text", config(vocab_size=512), "HS111"),
    "vocab_size below the tokenizer": ("zamba", config(vocab_size=300), "HS111"),
    "untied without a head": ("recurrent_gemma", config(tie_word_embeddings=False), "HS112"),
    "a prediction head announced": ("qwen3_5_text", config(mtp_num_hidden_layers=1), "HS113"),
    "a prediction head announced by count": ("bailing_hybrid", config(num_nextn_predict_layers=1), "HS113"),
    "a model type of its own, with code": ("qwen3_5_text", model_code, "HS110"),
    "a width that is a word": ("mamba2", config(hidden_size="wide"), "HS115"),
    "a dialect that transformers does not read": (
        "minimax+linear_first",
        config(layer_types=None, attn_type_list=[0, 0, 0, 1]),
        "HS116",
    ),
    # The tokenizer and its checkpoint.
    "no tokenizer": ("mamba", delete(TOKENIZER), "HS010"),
    "half a tokenizer": (
        "lfm2",
        lambda f: (f / TOKENIZER).write_text((f / TOKENIZER).read_text()[:5000]),
        "HS011",
    ),
    "a merge of unknown tokens": (
        "lfm2",
        edit(TOKENIZER, lambda t: t["model"]["merges"].append(["zz", "qq"])),
        "HS011",
    ),
    "two tokens with one id": ("lfm2", edit(TOKENIZER, lambda t: t["model"]["vocab"].update({"twin": 10})), "HS011"),
    "a tokenizer with code": ("qwen3_5_text", tokenizer_code, "HS012"),
    "an id beyond the embedding": (
        "bamba",
        edit(TOKENIZER, lambda t: t["added_tokens"][-1].update(id=ROWS + 5)),
        "HS201",
    ),
    "an eos that is no token": (
        "jamba",
        edit("generation_config.json", lambda c: c.update(eos_token_id=[2, 399])),
        "HS202",
    ),
    "an eos that does not stop": (
        "lfm2",
        edit("tokenizer_config.json", lambda c: c.update(eos_token="<|user|>")),
        "HS203",
    ),
    "added tokens with two ids": (
        "lfm2",
        edit("tokenizer_config.json", lambda c: c.update(added_tokens_decoder={"5": {"content": "<eos>"}})),
        "HS204",
    ),
    "truncation left on": (
        "lfm2",
        edit(
            TOKENIZER,
            lambda t: t.update(
                truncation={"direction": "Right", "max_length": 64, "strategy": "LongestFirst", "stride": 0}
            ),
        ),
        "HS205",
    ),
    # State types and quantisation.
    "a state in bf16": ("nemotron_h", config(mamba_ssm_cache_dtype="bfloat16"), "HS401"),
    "a state in fp16": ("qwen3_5_text", config(mamba_ssm_dtype="float16"), "HS401"),
}


def vocabulary(change: Callable[[dict], Any]) -> Spoil:
    return edit(TOKENIZER, lambda t: change(t["model"]["vocab"]))


def swap_tokens(table: dict) -> None:
    a, b = "t", "h"
    table[a], table[b] = table[b], table[a]


def replace_token(tokenizer: dict) -> None:
    """The last merge makes another token."""
    model = tokenizer["model"]
    left, right = model["merges"].pop()
    model["vocab"]["\u0120zzzz"] = model["vocab"].pop(left + right)


def swap_roles(tokenizer: dict) -> None:
    a, b = tokenizer["added_tokens"][-2:]
    a["id"], b["id"] = b["id"], a["id"]


def unigram(tokenizer: dict) -> None:
    table = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    tokenizer["model"] = {"type": "Unigram", "unk_id": 0, "vocab": [[token, -1.0] for token in table]}


def digits(tokenizer: dict) -> None:
    step = {"type": "Digits", "individual_digits": True}
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [step, tokenizer["pre_tokenizer"]]}


#: Spoilt as the draft of its clean twin.
DRAFTS: dict[str, tuple] = {
    "two tokens swapped": ("lfm2", vocabulary(swap_tokens), "HS301"),
    "a token replaced": ("qwen3_5_text", edit(TOKENIZER, replace_token), "HS302"),
    "special ids shifted": ("bamba", edit(TOKENIZER, swap_roles), "HS303"),
    "a role dropped": ("bamba", edit(TOKENIZER, lambda t: t["added_tokens"].pop() and None), "HS303"),
    "a merge dropped": ("jamba", edit(TOKENIZER, lambda t: t["model"]["merges"].pop(0) and None), "HS304"),
    "merges in another order": ("jamba", edit(TOKENIZER, lambda t: t["model"]["merges"].reverse()), "HS304"),
    "a normalizer": ("lfm2", edit(TOKENIZER, lambda t: t.update(normalizer={"type": "Lowercase"})), "HS305"),
    "digits one by one": ("nemotron_h", edit(TOKENIZER, digits), "HS306"),
    "a space before everything": (
        "lfm2",
        edit(TOKENIZER, lambda t: t["pre_tokenizer"].update(add_prefix_space=True)),
        "HS306",
    ),
    "another end": ("zamba2", edit("generation_config.json", lambda c: c.update(eos_token_id=[1, 2])), "HS308"),
    "another chat template": ("lfm2", write("chat_template.jinja", "{{ messages[0].content }}"), "HS309"),
    "a role that swallows spaces": (
        "lfm2",
        edit(TOKENIZER, lambda t: t["added_tokens"][-1].update(lstrip=True)),
        "HS310",
    ),
    "another kind of tokenizer": ("lfm2", edit(TOKENIZER, unigram), "HS311"),
    "a shorter context": ("qwen3_5_text", config(max_position_embeddings=64), "HS404"),
    "another rope theta": (
        "qwen3_5_text",
        edit(CONFIG, lambda c: c["rope_parameters"].update(rope_theta=5_000_000.0)),
        "HS405",
    ),
    # Notes: worth knowing, and nothing is wrong.
    "another first token": ("lfm2", edit("tokenizer_config.json", lambda c: c.update(bos_token="<eos>")), "HS313"),
    "another decoder": ("lfm2", edit(TOKENIZER, lambda t: t.update(decoder={"type": "Fuse"})), "HS312"),
    "no chat template": ("lfm2", delete("chat_template.jinja"), "HS309"),
}


HARMLESS = {"another first token", "another decoder", "no chat template"}
