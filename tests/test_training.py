"""The training recipe, small: every step runs and resumes, and the fast kernels are the family's mathematics."""

import gzip
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from hybridspec.drafts.distillation.optimizer import MuonAdamW, orthogonalise
from hybridspec.drafts.distillation.sitting import Processes, Sitting, learning_rate_scale
from hybridspec.drafts.distillation.training_kernels import training_kernels
from hybridspec.drafts.distillation.window_sampler import WindowSampler
from hybridspec.drafts.embedded_pair import data, distil, outputs, target, unloop
from hybridspec.drafts.embedded_pair.data import is_permissive, read_corpus
from hybridspec.drafts.embedded_pair.target import make_config, make_model
from hybridspec.drafts.embedded_pair.tasks import task_documents
from tests.tiny import tiny_model

CODE = '''def area(width, height):
    """Area of a rectangle."""
    total = width * height
    if width < 0:
        raise ValueError(width)
    return total
'''
PROSE = "It was a bright cold day in the valley of {n}, and clocks were striking. " * 12


def corpus(folder: Path) -> Path:
    folder.mkdir()
    for domain in ("chat", "code", "docs", "json", "logs", "math", "prose"):
        text = CODE if domain == "code" else PROSE
        documents = [text.replace("{n}", f"{domain} {i}") + f"\n{i}" for i in range(40)]
        with gzip.open(folder / f"{domain}.txt.gz", "wt") as file:
            file.write("".join(f"{d}\n<|endoftext|>\n" for d in documents))
    return folder


def call(monkeypatch: pytest.MonkeyPatch, module: object, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, arguments)])
    module.main()


def test_every_step_from_corpus_to_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, run = tmp_path / "tokens", tmp_path / "run"
    call(monkeypatch, data, "--corpus", corpus(tmp_path / "corpus"), "--out", tokens, "--vocab-size", 300)
    common = ("--rows", 4, "--length", 32, "--no-compile")
    call(monkeypatch, target, "--data", tokens, "--out", run, "--minutes", 0.04, "--layers", 4, *common)
    checkpoint = torch.load(run / "checkpoint.pt", weights_only=True)
    call(monkeypatch, target, "--data", tokens, "--out", run, "--minutes", 0.08, "--layers", 4, *common)
    resumed = torch.load(run / "checkpoint.pt", weights_only=True)
    assert resumed["step"] > checkpoint["step"] > 0
    assert resumed["tokens"] > checkpoint["tokens"]

    pool = run / "outputs.npy"
    options = ("--target", run / "target", "--data", tokens)
    call(monkeypatch, outputs, *options, "--out", pool, "--minutes", 0.001, "--rows", 6, "--prompt", 8, "--length", 33)
    assert np.load(pool).shape == (6, 33)
    monkeypatch.setattr(distil, "DRAFTS", {"small": (2, 64)})
    call(monkeypatch, distil, *options, "--outputs", pool, "--out", run / "drafts", "--minutes", 0.04, *common)
    draft = AutoModelForCausalLM.from_pretrained(run / "drafts" / "small", local_files_only=True)
    assert draft.config.layer_types == ["linear_attention", "full_attention"]
    assert (run / "drafts" / "small" / "tokenizer.json").read_bytes() == (
        run / "target" / "tokenizer.json"
    ).read_bytes()


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    """Seeded batches and a full checkpoint: the weights after 3 + 3 steps are those after 6."""

    def train(folder: Path, steps: int) -> dict:
        model = make_model(make_config(2, 64, 32), seed=0)
        sitting = Sitting(folder, {"m": model}, minutes=1e9, processes=Processes(0, 1))

        def step(number: int, _: float) -> tuple[dict[str, float], int]:
            batch = torch.randint(0, 64, (2, 33), generator=torch.Generator().manual_seed(number))
            logits = model(input_ids=batch[:, :-1], use_cache=False).logits
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
            sitting.stop_asked = number + 1 == steps
            return {}, 64

        sitting.run(step)
        return model.state_dict()

    whole = train(tmp_path / "whole", 6)
    train(tmp_path / "parts", 3)
    parts = train(tmp_path / "parts", 6)
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("value_heads_per_key_head", [1, 2])
def test_kernels_equal_transformers_in_values_and_gradients(value_heads_per_key_head: int) -> None:
    model = tiny_model(value_heads_per_key_head=value_heads_per_key_head, spread=0.1)
    batch = torch.randint(3, 90, (2, 96), generator=torch.Generator().manual_seed(0))

    def logits_and_gradients() -> tuple[torch.Tensor, list[torch.Tensor]]:
        logits = model(input_ids=batch, use_cache=False).logits
        gradients = torch.autograd.grad(logits.logsumexp(-1).mean(), list(model.parameters()))
        return logits.detach(), list(gradients)

    expected, expected_gradients = logits_and_gradients()
    with training_kernels():
        logits, gradients = logits_and_gradients()
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_kernels_refuse_what_they_do_not_serve() -> None:
    with training_kernels(), pytest.raises(ValueError, match="multiples of 32"):
        tiny_model()(input_ids=torch.ones(1, 33, dtype=torch.long), use_cache=False)


@pytest.mark.parametrize("shape", [(3, 16, 8), (2, 8, 16), (1, 12, 12)])
def test_orthogonalise_pushes_singular_values_towards_one(shape: tuple[int, int, int]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(matrices))
    assert values.min() > 0.3
    assert values.max() < 1.4


def test_optimizer_lowers_a_loss() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 16))
    optimizer, x = MuonAdamW(model), torch.randn(64, 16)
    losses = []
    for _ in range(60):
        loss = (model(x) - x.flip(1)).square().mean()
        loss.backward()
        optimizer.step(1.0)
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


def test_learning_rate_schedule() -> None:
    assert learning_rate_scale(0, 0.0) == pytest.approx(1 / 40)
    assert learning_rate_scale(100, 0.2) == 1.0
    assert learning_rate_scale(100, 0.7) == pytest.approx(0.5)
    assert learning_rate_scale(100, 1.0) == pytest.approx(0.03)


def test_windows_repeat_for_the_same_seed_step_and_rank_only(tmp_path: Path) -> None:
    np.arange(5000, dtype=np.uint16).tofile(tmp_path / "a.bin")
    sampler = WindowSampler(tmp_path, {"a": 1.0})
    first = sampler.batch(3, 0, 4, 32)
    assert first.shape == (4, 33)
    assert torch.equal(first, WindowSampler(tmp_path, {"a": 1.0}).batch(3, 0, 4, 32))
    assert not torch.equal(first, sampler.batch(3, 1, 4, 32))
    assert not torch.equal(first, sampler.batch(4, 0, 4, 32))


def test_missing_inputs_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no <domain>.txt"):
        read_corpus(tmp_path)
    with pytest.raises(FileNotFoundError, match="no token file for a"):
        WindowSampler(tmp_path, {"a": 1.0})


def test_mpl_sources_are_left_out() -> None:
    assert not is_permissive("from tqdm import tqdm\nclass tqdm_gui(tqdm): ...")
    assert is_permissive("print('hello')")


def test_tasks_copy_faithfully() -> None:
    documents = task_documents([CODE] * 3, [PROSE.replace("{n}", str(i)) for i in range(6)])
    renames = [d for d in documents if "Rename the parameter" in d]
    repeats = [d for d in documents if "Repeat the beginning" in d]
    assert renames and repeats
    assert all("def area(width_value, height)" in d.split("<|assistant|>")[1] for d in renames)
    for d in repeats[:50]:
        question, answer = d.split("<|assistant|>\n")
        assert answer.strip() in question


def test_loops_are_found_and_records_that_differ_are_not() -> None:
    loop = [1, 2, 3, 4, *[7, 8, 9] * 6, 5]
    records = [t for i in range(8) for t in (20, 21, 22, 30 + i)]
    length = max(len(loop), len(records))
    rows = torch.tensor([row + [60 + i for i in range(length - len(row))] for row in (loop, records)])
    mask = unloop.loop_mask(rows, first=4)
    assert mask[0].nonzero().flatten().tolist() == list(range(4 + 3 + unloop.GRACE, 4 + 18))
    assert not mask[1].any()
    assert not unloop.loop_mask(rows, first=40).any()


def test_unlikelihood_by_hand() -> None:
    logits = torch.log(torch.tensor([[[0.5, 0.25, 0.25], [0.2, 0.2, 0.6]]]))
    tokens, mask = torch.tensor([[0, 2]]), torch.tensor([[True, True]])
    expected = -(np.log(0.5) + np.log(0.4)) / 2
    assert unloop.unlikelihood(logits, tokens, mask).item() == pytest.approx(expected, rel=1e-5)
    assert unloop.unlikelihood(logits, tokens, mask & False).item() == 0.0
