"""Training a multi-token-prediction head: what it optimises is what drafting computes, and the checkpoint drafts."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from hybridspec import embedded
from hybridspec.drafts.embedded_pair import mtp_head
from hybridspec.drafts.embedded_pair.data import MIXTURE
from hybridspec.drafts.embedded_pair.mtp_head import depth_logits, depth_mask
from hybridspec.drafts.embedded_pair.tokenizer import load_tokenizer
from hybridspec.drafts.registry import make_draft
from hybridspec.runtime.runner import TargetRunner
from tests.families import family_model, some_tokens
from tests.mtp import drafted_logits, family_draft, target_hidden
from tests.tiny import tiny_model


def test_training_computes_what_drafting_computes() -> None:
    model, head, tokens = family_model("qwen3_5_text"), family_draft("qwen3_5_text").head, some_tokens(14)
    hidden = target_hidden(model, tokens[:-1], streams=False)
    by_depth = depth_logits(head, torch.tensor([tokens[1:]]), hidden.unsqueeze(0), depths=3)
    for known in (2, 5, 11):
        expected = drafted_logits(head, model, tokens[:known], tokens[known : known + 3])
        for depth, logits in enumerate(by_depth):
            # The first drafted token comes from entry known - 2, each further one from the next.
            torch.testing.assert_close(logits[0, known - 2], expected[depth], atol=1e-4, rtol=1e-4)


def test_an_entry_sees_one_of_each_depth_between() -> None:
    mask = depth_mask(5, 2)[0, 0, 4].view(3, 5).int().tolist()
    assert mask == [[1, 1, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 0, 1]]


def test_a_trained_checkpoint_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, data = tmp_path / "target", tmp_path / "data"
    tokenizer = load_tokenizer(embedded.TARGET)
    tiny_model(vocabulary=len(tokenizer), context=8192).save_pretrained(target)
    tokenizer.save_pretrained(target)
    data.mkdir()
    random = np.random.default_rng(0)
    for domain in MIXTURE:
        random.integers(3, 2000, 400).astype(np.uint16).tofile(data / f"{domain}.bin")
    np.save(data / "outputs.npy", random.integers(3, 2000, (4, 33)).astype(np.uint16))
    monkeypatch.setattr(embedded, "workload_files", lambda: {"prose": embedded.WORKLOADS / "prose.jsonl"})
    options = {"target": target, "data": data, "outputs": data / "outputs.npy", "out": tmp_path / "out"}
    sizes = {"minutes": 0.02, "rows": 2, "length": 32, "depths": 2, "prompts": 1, "new": 8}
    arguments = [str(part) for key, value in (options | sizes).items() for part in (f"--{key}", value)]
    monkeypatch.setattr(sys, "argv", ["mtp_head", *arguments, "--no-compile"])
    mtp_head.main()

    checkpoint = tmp_path / "out" / "checkpoint"
    assert json.loads((checkpoint / "config.json").read_text())["mtp_num_hidden_layers"] == 1
    trained = torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=True)["models"]["head"]
    head = make_draft("mtp", TargetRunner.from_pretrained(checkpoint)).head
    for name, tensor in head.state_dict().items():
        assert torch.equal(tensor, trained[name]), name
    assert head.state_dict()["decoder.layers.0.mlp.down_proj.weight"].abs().sum() > 0
    measured = json.loads((tmp_path / "out" / "acceptance.json").read_text())["prose"]
    assert len(measured["by_position"]) == 3
    assert measured["cost_ratio"] > 0
