"""Distillation end to end on a tiny target: what is saved, what a second call goes on from, and what is refused."""

import gzip
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hybridspec.cli import app as cli
from hybridspec.decoding.loop import decode
from hybridspec.decoding.step import Statistics
from hybridspec.drafts.distillation import target_outputs
from hybridspec.drafts.distillation.corpus import encode, prepare, split
from hybridspec.drafts.distillation.distill import distill
from hybridspec.drafts.distillation.documents import read_documents
from hybridspec.drafts.distillation.logit_distillation import LogitsPool, learn, target_logits
from hybridspec.drafts.distillation.provenance import PROVENANCE
from hybridspec.drafts.distillation.settings import DistillationSettings
from hybridspec.drafts.embedded_pair.tokenizer import train_tokenizer
from hybridspec.drafts.same_architecture import SameArchitectureDraft
from hybridspec.errors import HybridspecError, InputError
from hybridspec.runtime.runner import TargetRunner
from tests.families import FAMILIES, TOKENS, build, shake
from tests.tiny import tiny_model

VOCABULARY = 300
DOCUMENTS = [
    f"Report {n}: {n % 7} ships left the harbour of {'ABCDEFG'[n % 7]} with {n * 3} crates. " * 3 for n in range(80)
]
SMALL = {"minutes": 0.02, "length": 32, "rows": 1, "prompts": 2, "new_tokens": 6, "k": 3}


@pytest.fixture(autouse=True)
def few_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_outputs, "OUTPUT_ROWS", 3)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetRunner:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model(vocabulary=VOCABULARY, layers=4).save_pretrained(folder)
    train_tokenizer(DOCUMENTS, VOCABULARY).save_pretrained(folder)
    return TargetRunner.from_pretrained(folder)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    with gzip.open(folder / "ships.txt.gz", "wt") as file:
        file.write("\n<|endoftext|>\n".join(DOCUMENTS))
    rows = [json.dumps({"prompt": f"{text} and back"}) for text in DOCUMENTS]
    (folder / "back.jsonl").write_text("\n".join(rows) + "\n")
    return folder


def test_a_draft_is_an_ordinary_checkpoint_with_provenance(target: TargetRunner, corpus: Path, tmp_path: Path) -> None:
    stages = []
    settings = DistillationSettings(layers=2, **SMALL | {"minutes": 0.04})
    provenance = distill(target, [corpus], tmp_path, settings, progress=lambda *now: stages.append(now))
    assert provenance == json.loads((tmp_path / PROVENANCE).read_text())
    assert provenance["complete"] and provenance["kept_layers"] == [0, 3]
    assert provenance["corpus"]["tokens"].keys() == {"ships", "back"}
    assert provenance["steps"] * 2 * 32 == provenance["tokens_trained"] > provenance["different_tokens"] > 0
    before, after = (provenance["held_out"][name] for name in ("before", "after"))
    assert after["overlap"] > before["overlap"]
    assert {stage for stage, _, _ in stages} >= {"corpus", "outputs of the target", "training"}
    assert all(0 <= share <= 1 for _, share, _ in stages)

    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path, target.path))
    assert ours.keys() == {name for name in theirs if ".layers." not in name} | {
        name.replace(".layers.3.", ".layers.1.") for name in theirs if ".layers.0." in name or ".layers.3." in name
    }
    for name, value in ours.items():
        source = theirs[name.replace(".layers.1.", ".layers.3.")]
        assert torch.equal(value, source) == (".layers." not in name), name

    draft = SameArchitectureDraft(TargetRunner.from_pretrained(tmp_path))
    draft.check_pair(target)
    statistics = Statistics()
    list(decode(target, target.encode(DOCUMENTS[0]), draft=draft, k=3, max_new_tokens=12, statistics=statistics))
    assert statistics.drafted


def interrupt(stage: str) -> Callable[[str, float, str], None]:
    """Ctrl-C when that stage has made some progress."""
    calls = []

    def progress(now: str, share: float, _: str) -> None:
        if now == stage:
            calls.append(share)
            if len(calls) == 2:
                signal.raise_signal(signal.SIGINT)

    return progress


def test_an_interrupt_in_training_saves_the_draft_and_the_next_call_goes_on(
    target: TargetRunner, corpus: Path, tmp_path: Path
) -> None:
    handler = signal.getsignal(signal.SIGINT)
    settings = DistillationSettings(layers=2, **SMALL)
    first = distill(target, [corpus], tmp_path, settings, progress=interrupt("training"))
    assert not first["complete"] and first["steps"] == 2
    assert first["held_out"]["after"] is None and first["held_out"]["before"]
    assert signal.getsignal(signal.SIGINT) is handler
    TargetRunner.from_pretrained(tmp_path)
    second = distill(target, [corpus], tmp_path, settings)
    assert second["complete"] and second["steps"] > 2
    assert second["held_out"]["before"] == first["held_out"]["before"]
    weights = (tmp_path / "model.safetensors").read_bytes()
    stages = set()
    third = distill(target, [corpus], tmp_path, settings, progress=lambda stage, *_: stages.add(stage))
    assert third["steps"] == second["steps"] and third["held_out"] == second["held_out"]
    assert weights == (tmp_path / "model.safetensors").read_bytes()
    assert not any("held-out" in stage for stage in stages)
    more = distill(target, [corpus], tmp_path, DistillationSettings(layers=2, **SMALL | {"minutes": 0.04}))
    assert more["steps"] > second["steps"]


@pytest.mark.parametrize("stage", ["outputs of the target", "held-out text, after"])
def test_an_interrupt_elsewhere_loses_nothing(target: TargetRunner, corpus: Path, tmp_path: Path, stage: str) -> None:
    settings = DistillationSettings(layers=2, **SMALL)
    with pytest.raises(KeyboardInterrupt):
        distill(target, [corpus], tmp_path, settings, progress=interrupt(stage))
    if stage == "held-out text, after":
        assert not json.loads((tmp_path / PROVENANCE).read_text())["complete"]
    assert distill(target, [corpus], tmp_path, settings)["complete"]


def test_a_family_that_returns_no_cache_learns_from_outputs_of_our_sessions(corpus: Path, tmp_path: Path) -> None:
    arguments = TOKENS | FAMILIES["recurrent_gemma"] | {"vocab_size": VOCABULARY, "tie_word_embeddings": False}
    model = build("recurrent_gemma", arguments).float().eval()
    shake(model)
    runner = TargetRunner(model, train_tokenizer(DOCUMENTS, VOCABULARY))
    provenance = distill(runner, [corpus], tmp_path, DistillationSettings(**SMALL))
    assert provenance["complete"] and provenance["kept_layers"] == [0, 5]
    assert np.load(tmp_path / "training" / "outputs.npy").shape[1] == 33
    assert TargetRunner.from_pretrained(tmp_path).config.block_types == ["recurrent", "attention"]


def write(folder: Path, name: str, content: bytes) -> Path:
    (folder / name).write_bytes(content)
    return folder / name


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b" \n", "a.txt: no text in it"),
        ("a.txt", b"\xff\xfe", "a.txt: not UTF-8 text"),
        ("a.txt.gz", b"plain", "a.txt.gz: not a whole gzip file"),
        ("a.txt.gz", gzip.compress(b"text " * 999, mtime=0)[:-20], "a.txt.gz: not a whole gzip file"),
        ("a.jsonl", b'{"text": "a"}\n{"prompt": 3}\n', "a.jsonl, line 2: neither field 'text' nor 'prompt'"),
        ("a.jsonl", b'{"text": "a"}\n{"text"\n', "a.jsonl, line 2: not valid JSON"),
        ("a.txt", b"A few words, not more.", "give more text with --corpus"),
        ("a.bin", b"", "no text in this folder"),
    ],
)
def test_a_bad_corpus_is_named(target: TargetRunner, tmp_path: Path, name: str, content: bytes, message: str) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    write(folder, name, content)
    for path in (folder, folder / name):
        with pytest.raises(InputError, match=message if path is folder or "folder" not in message else "no text in it"):
            distill(target, [path], tmp_path / "out", DistillationSettings(**SMALL))
    write(folder, name, b"").unlink()
    write(folder, "good.txt", "\n<|endoftext|>\n".join(DOCUMENTS).encode())
    # The refused corpus is forgotten.
    with pytest.raises(KeyboardInterrupt):
        distill(target, [folder], tmp_path / "out", DistillationSettings(**SMALL), progress=interrupt("corpus"))


def test_options_and_folders_that_do_not_fit_are_refused(target: TargetRunner, corpus: Path, tmp_path: Path) -> None:
    def refused(message: str, out: Path = tmp_path / "new", texts: Path = corpus, **changes: object) -> None:
        with pytest.raises(HybridspecError, match=message):
            distill(target, [texts], out, DistillationSettings(**SMALL | changes))

    refused("no such file or folder", texts=tmp_path / "nowhere")
    refused("minutes must be above 0", minutes=0.0)
    refused("K = 5000 is beyond the context", k=5000)
    refused("a draft of 5 layers", layers=5)
    refused("the target has layers 0 to 3, not 4", keep_layers=(0, 4))
    refused("a draft of layers 0 cannot run by itself", layers=1)
    refused("not both", layers=2, keep_layers=(0, 3))
    refused("windows of 4096 tokens exceed the context", length=4096)
    refused("is the target itself", out=target.path)
    other = tmp_path / "other"
    tiny_model().save_pretrained(other)
    refused("holds a checkpoint, and nothing that its training could go on from", out=other)
    assert not (other / "training").exists()
    refused("cannot make this folder", out=write(tmp_path, "file", b"") / "below")

    out = tmp_path / "out"
    distill(target, [corpus], out, DistillationSettings(layers=2, **SMALL))
    refused("begun with another kept layers", out=out, layers=3)
    refused("begun with another length", out=out, layers=2, length=64)
    refused("begun with another corpus", out=out, layers=2, texts=corpus / "back.jsonl")
    second = TargetRunner(tiny_model(vocabulary=VOCABULARY, layers=4, seed=9), target.tokenizer)
    with pytest.raises(InputError, match="begun with another target"):
        distill(second, [corpus], out, DistillationSettings(layers=2, **SMALL))
    write(out / "training", "checkpoint.pt", b"broken")
    refused("checkpoint.pt: training cannot go on from it", out=out, layers=2)


def test_a_loss_that_is_no_number_is_told(target: TargetRunner, corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(HybridspecError, match="training went astray. Use a smaller --rate"):
        distill(target, [corpus], tmp_path, DistillationSettings(**SMALL | {"rate": 1e30, "minutes": 0.2}))


def test_the_command(
    target: TargetRunner, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--minutes", "0.02", "--length", "32", "--rows", "1", "--prompts", "1", "--k", "2", "--out", tmp_path)

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["hybridspec", "distill", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        captured = capsys.readouterr()
        return int(stop.value.code or 0), captured.out, captured.err

    status, out, _ = run("--target", target.path, "--corpus", corpus, "--layers", 2, *options, "--json")
    assert status == 0
    assert json.loads(out) == json.loads((tmp_path / PROVENANCE).read_text())
    status, out, _ = run("--target", target.path, "--corpus", corpus, "--keep-layers", "0,3", *options)
    assert status == 0
    assert "Layers 0, 3 of 4" in out and "trained" in out and "hybridspec tune --target" in out
    status, _, err = run("--target", target.path, "--corpus", corpus, "--keep-layers", "0;3", *options)
    assert status == 2 and "give layer numbers with commas" in err
    assert run("--help")[1].count("Example: hybridspec distill") == 1


def test_held_out_text_is_not_trained_on(target: TargetRunner, tmp_path: Path) -> None:
    training, held_out = split(DOCUMENTS)
    assert len(held_out) == 2 and sorted(training + held_out) == sorted(DOCUMENTS)
    book = "".join(f"Chapter {n} begins here, and it goes on. " for n in range(2000))
    training, held_out = split([book])
    assert training[0] + "".join(held_out) == book and 0.04 < len("".join(held_out)) / len(book) < 0.06
    assert split(["tiny"]) == (["tiny"], [])

    path = write(tmp_path, "ships.txt", "\n<|endoftext|>\n".join(DOCUMENTS).encode())
    corpus = prepare([path], [], target.tokenizer, VOCABULARY, tmp_path / "tokens", 32, 1.0)
    stream = np.fromfile(tmp_path / "tokens" / "ships.bin", np.uint16).tolist()
    # A text with its end behind it: no other begins alike.
    patterns = [target.tokenizer(text)["input_ids"] for text in DOCUMENTS]
    found = {text for text, ids in zip(DOCUMENTS, patterns, strict=True) if _occurs(ids, stream)}
    assert found == set(DOCUMENTS) - set(corpus.held_out["ships"])
    windows = corpus.held_out_windows(target.tokenizer, 32, 3)
    assert windows.shape == (3, 33)
    assert _occurs(windows[0].tolist(), encode(target.tokenizer, corpus.held_out["ships"]))
    assert read_documents(path) == [d.strip("\n") for d in DOCUMENTS]


def _occurs(part: list[int], whole: list[int]) -> bool:
    return any(whole[i : i + len(part)] == part for i in range(len(whole) - len(part) + 1))


def test_a_vocabulary_beyond_sixteen_bits_keeps_its_tokens(target: TargetRunner, tmp_path: Path) -> None:
    path = write(tmp_path, "ships.txt", "\n<|endoftext|>\n".join(DOCUMENTS).encode())
    small, large = (
        prepare([path], [], target.tokenizer, size, tmp_path / str(size), 32, 1.0) for size in (VOCABULARY, 2**17)
    )
    assert small.dtype is np.uint16 and large.dtype is np.uint32
    assert torch.equal(small.sampler(0).batch(5, 0, 3, 32), large.sampler(0).batch(5, 0, 3, 32))


def test_logits_are_those_of_the_target_and_their_gradients_add_up() -> None:
    target, draft = tiny_model(layers=4), tiny_model(layers=4, seed=3)
    batches = iter(torch.randint(3, 90, (20, 2, 16), generator=torch.Generator().manual_seed(0)))
    pool = LogitsPool(target, rows=2, length=16, seed=0)
    for step in range(8):
        parts = list(pool.step(step, lambda: next(batches)))
        for inputs, logits in parts:
            torch.testing.assert_close(logits, target_logits(target, inputs), rtol=2e-3, atol=2e-3)
    assert pool.fresh_tokens == 2 * 2 * 16
    without = LogitsPool(target, rows=2, length=16, seed=0, largest_bytes=1000)
    assert len(list(without.step(0, lambda: next(batches)))) == len(list(without.step(1, lambda: next(batches)))) == 1
    assert without.fresh_tokens == 2 * 2 * 16

    inputs = torch.randint(3, 90, (3, 16), generator=torch.Generator().manual_seed(1))
    logits = target_logits(target, inputs)

    def gradient(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[dict, torch.Tensor]:
        draft.zero_grad()
        return learn({"d": draft}, parts, 3), draft.model.layers[0].mlp.up_proj.weight.grad.clone()

    whole, expected = gradient([(inputs, logits)])
    split_up, found = gradient([(inputs[:1], logits[:1]), (inputs[1:], logits[1:])])
    torch.testing.assert_close(found, expected)
    assert split_up == pytest.approx(whole)
    draft.zero_grad()
