"""Bridges: the folder they are kept in, their training, the probe that judges them, and those that are shipped."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

from hybridspec import embedded
from hybridspec.decoding.loop import decode
from hybridspec.decoding.step import Statistics
from hybridspec.drafts.distillation.text_windows import TextWindows
from hybridspec.drafts.full_attention import viability
from hybridspec.drafts.full_attention.bridge_training import train_bridges
from hybridspec.drafts.full_attention.bridges import (
    SETTINGS,
    WEIGHTS,
    Bridge,
    describe,
    fingerprint,
    load_bridges,
    make_bridges,
    save_bridges,
)
from hybridspec.drafts.full_attention.reduced import ReducedModel
from hybridspec.drafts.full_attention.strategy import FullAttentionDraft
from hybridspec.drafts.registry import make_draft
from hybridspec.errors import HybridspecError, IncompatiblePairError, InputError, ModelLoadError
from hybridspec.runtime.runner import TargetRunner
from hybridspec.tuning.workloads.sources import load_workload
from tests.test_cli import run
from tests.test_full_attention import faint_model
from tests.tiny import tiny_model

MakeRunner = Callable[..., TargetRunner]
TEXT = "Once there was a bridge of {n} stones, and nobody had ever counted them twice.\n" * 20


@pytest.fixture(scope="module")
def shipped() -> TargetRunner:
    return TargetRunner.from_pretrained(embedded.TARGET)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for name in ("a.txt", "b.txt"):
        documents = [TEXT.replace("{n}", str(i)) for i in range(9)]
        (folder / name).write_text("\n<|endoftext|>\n".join(documents))
    return folder


@pytest.fixture
def target(shipped: TargetRunner) -> TargetRunner:
    """A tiny model with a real tokenizer."""
    return TargetRunner(tiny_model(vocabulary=2048), shipped.tokenizer, rollback="tape")


def test_a_new_bridge_changes_nothing_and_a_trained_one_follows_its_formula() -> None:
    torch.manual_seed(0)
    bridge = Bridge(8, 3, 5)
    h, context = torch.randn(1, 4, 8), torch.randn(1, 4, 16)
    assert torch.equal(bridge(h, context), h)
    for parameter in bridge.parameters():
        nn.init.normal_(parameter)
    for t in range(4):
        x = torch.cat([h[0, t] / h[0, t].square().mean().sqrt(), context[0, t]]) * bridge.scale
        gate = bridge.gate.weight @ x
        expected = h[0, t] + bridge.gain * (bridge.down.weight @ (gate * gate.sigmoid() * (bridge.up.weight @ x)))
        torch.testing.assert_close(bridge(h, context)[0, t], expected, rtol=1e-4, atol=1e-4)


def test_saved_bridges_come_back(target: TargetRunner, tmp_path: Path) -> None:
    settings = describe(target, 3, 16)
    bridges = make_bridges(settings)
    for parameter in bridges.parameters():
        nn.init.normal_(parameter, std=0.1)
    save_bridges(tmp_path, bridges, settings)
    loaded, read = load_bridges(tmp_path, target)
    assert read == settings
    for ours, theirs in zip(loaded.parameters(), bridges.parameters(), strict=True):
        assert torch.equal(ours, theirs.detach().half().float())
    draft = make_draft(f"full-attention:{tmp_path}", target)
    assert draft.name == "full-attention" and draft.reduced.window == 3
    assert make_draft("full-attention", target).name == "full-attention without bridges"


def test_weights_have_one_fingerprint_in_any_dtype(make_runner: MakeRunner) -> None:
    plain = make_runner()
    half = TargetRunner(tiny_model(layers=4, seed=1).__class__(plain.model.config).eval(), rollback="tape")
    half.model.load_state_dict(plain.model.state_dict())
    half.model.bfloat16()
    assert fingerprint(half) == fingerprint(plain)
    assert fingerprint(make_runner(seed=9)) != fingerprint(plain)


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("target", {"model_type": "qwen3_5_text", "fingerprint": "0"}, IncompatiblePairError),
        ("kept_layers", [2], IncompatiblePairError),
        ("width", 16, IncompatiblePairError),
        ("inner", "many", ModelLoadError),
        ("runs", None, ModelLoadError),
        ("inner", 8, ModelLoadError),
    ],
)
def test_bridges_that_do_not_fit_are_refused(
    target: TargetRunner, tmp_path: Path, field: str, value: object, error: type[HybridspecError]
) -> None:
    settings = describe(target, 2, 16)
    save_bridges(tmp_path, make_bridges(settings), settings)
    path = tmp_path / SETTINGS
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    # Sizes within the file that contradict its own weights show when these are loaded.
    with pytest.raises(error, match=WEIGHTS if value == 8 else field):
        FullAttentionDraft.create(target, str(tmp_path))


def test_folders_without_bridges_are_refused(target: TargetRunner, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="hybridspec bridges"):
        FullAttentionDraft.create(target, str(tmp_path / "nowhere"))
    settings = describe(target, 2, 16)
    save_bridges(tmp_path, make_bridges(settings), settings)
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(ModelLoadError, match=WEIGHTS):
        FullAttentionDraft.create(target, str(tmp_path))


def test_windows_of_a_corpus_repeat_and_share_files(corpus: Path, shipped: TargetRunner, tmp_path: Path) -> None:
    documents = TextWindows(corpus, shipped.tokenizer, seed=1)
    rows = documents.windows(3, 4, 50)
    assert rows.shape == (4, 50)
    assert torch.equal(rows, TextWindows(corpus, shipped.tokenizer, seed=1).windows(3, 4, 50))
    assert not torch.equal(rows, documents.windows(4, 4, 50))
    (tmp_path / "notes.md").write_text("text")
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe")
    for name, word in (("", "no text|UTF-8"), ("nowhere", "no such"), ("bytes.txt", "UTF-8")):
        with pytest.raises(InputError, match=word):
            TextWindows(tmp_path / name, shipped.tokenizer)


def test_training_learns_resumes_and_keeps_what_was_trained(target: TargetRunner, corpus: Path, tmp_path: Path) -> None:
    options = {"window": 2, "inner": 16, "rows": 2, "length": 32}
    first = train_bridges(target, corpus, tmp_path, minutes=0.02, **options)
    second = train_bridges(target, corpus, tmp_path, minutes=0.06, **options)
    assert second.step > first.step > 0
    bridges, settings = load_bridges(tmp_path, target)
    assert settings.training["steps"] == second.step
    assert settings.training["corpus"] == ["a.txt", "b.txt"]
    ids = TextWindows(corpus, target.tokenizer, seed=5).windows(0, 1, 100)[0].tolist()
    trained = viability.measure(ReducedModel(target, bridges, 2), ids).viability()
    skipped = viability.measure(ReducedModel(target), ids).viability()
    assert trained.acceptance > skipped.acceptance
    with pytest.raises(InputError, match='"inner" is 16.*17'):
        train_bridges(target, corpus, tmp_path, **options | {"inner": 17})


def test_the_probe_compares_with_the_whole_model() -> None:
    """Numbers recomputed from plain passes; nothing is lost where recurrent layers add nothing."""
    tokens = [5, 17, 3, 60, 41, 8, 22, 35, 90, 11, 7, 64]
    silent = TargetRunner(faint_model(0.0), rollback="tape")
    found = viability.measure(ReducedModel(silent), tokens).viability()
    with torch.no_grad():
        logs = silent.model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    loss = -sum(float(logs[i, token]) for i, token in enumerate(tokens[1:])) / 11
    assert found.tokens == 11
    assert found.perplexity == pytest.approx(math.exp(loss), rel=1e-4)
    assert found.ratio == pytest.approx(1, rel=1e-4) and found.alone_ratio == pytest.approx(1, rel=1e-4)
    assert found.agreement == 1 and found.acceptance == pytest.approx(1, rel=1e-4)
    loud = viability.measure(ReducedModel(TargetRunner(faint_model(1.0), rollback="tape")), tokens).viability()
    assert loud.acceptance < 0.9 and loud.agreement < 1
    pooled = viability.probe(ReducedModel(silent), [tokens, tokens[:6]], most=15)
    parts = [viability.measure(ReducedModel(silent), part).viability() for part in (tokens, tokens[:3])]
    losses = [part.tokens * math.log(part.perplexity) for part in parts]
    assert pooled.tokens == 11 + 2 and pooled.perplexity == pytest.approx(math.exp(sum(losses) / 13), rel=1e-4)


@pytest.mark.parametrize(("ratio", "verdict"), [(1, "can pay"), (5, "doubtful"), (20, "doubtful"), (21, "cannot pay")])
def test_verdicts(ratio: float, verdict: str) -> None:
    assert viability.Viability(1, 2.0, 2.0 * ratio, 1.0, 0.0, 0.0).verdict == verdict


def test_shipped_bridges_fit_and_draft(shipped: TargetRunner) -> None:
    draft = make_draft("full-attention", shipped)
    assert draft.name == "full-attention"
    with safe_open(embedded.BRIDGES / WEIGHTS, "pt") as weights:
        assert all(torch.isfinite(weights.get_tensor(k)).all() for k in weights.keys())  # noqa: SIM118
    assert sum(path.stat().st_size for path in embedded.BRIDGES.iterdir()) < 2.6e6
    counts = {"full-attention": Statistics(), "full-attention:none": Statistics()}
    for prompt in load_workload(embedded.workload_files()["math"]).prompts[:2]:
        tokens = shipped.encode(prompt.text)
        plain = [token.id for token in decode(shipped, tokens, max_new_tokens=16)]
        for spec, statistics in counts.items():
            output = decode(
                shipped, tokens, draft=make_draft(spec, shipped), k=2, max_new_tokens=16, statistics=statistics
            )
            assert [token.id for token in output] == plain
    assert counts["full-attention"].acceptance_rate > 0.4
    assert counts["full-attention:none"].acceptance_rate < 0.1


def test_probe_command(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    status, out, _ = run(capsys, "probe", "--text", str(text), "--tokens", "200", "--json")
    answer = json.loads(out)
    assert (status, answer["verdict"]) == (0, "can pay")
    assert answer["texts"]["text.txt"]["ratio"] == answer["texts"]["all"]["ratio"] < 5
    status, out, _ = run(capsys, "probe", "--text", str(text), "--tokens", "200", "--bridges", "none")
    assert status == 1 and "cannot pay" in out
    status, _, error = run(capsys, "probe", "--text", str(tmp_path / "nowhere.txt"))
    assert status == 2 and "nowhere.txt" in error


def test_bridges_command(capsys: pytest.CaptureFixture, corpus: Path, tmp_path: Path) -> None:
    options = ("--corpus", str(corpus), "--minutes", "0.01", "--rows", "1", "--length", "16", "--inner", "8")
    status, out, _ = run(capsys, "bridges", *options, "--out", str(tmp_path / "new"))
    assert status == 0 and "bridges of" in out
    assert (tmp_path / "new" / WEIGHTS).is_file()
    status, _, error = run(capsys, "bridges", "--corpus", str(tmp_path / "nowhere"), "--out", str(tmp_path / "other"))
    assert status == 2 and "nowhere" in error
