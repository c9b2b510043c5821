"""The Triton kernels equal their torch twins and the token-by-token rules: outputs, tape, and every rollback from it.

Without a GPU they run in Triton's interpreter (see conftest.py), and a compiler for one is enough to build them.
"""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hybridspec.errors import InputError
from hybridspec.recurrence import gated_delta, kernels, ssd
from hybridspec.recurrence.tape import Tape, rollback
from hybridspec.runtime.runner import TargetRunner
from tests import families, recurrences, test_gated_delta, test_ssd
from tests.comparison import assert_close
from tests.examples import examples
from tests.recurrences import Block, assert_near

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if importlib.util.find_spec("triton") is None:
    reason = "the GPU kernels are NOT TESTED, Triton is not installed: pip install triton"
    print(f"hybridspec: {reason}", file=sys.stderr)
    pytest.skip(reason, allow_module_level=True)

from hybridspec.recurrence.kernels import gated_delta as gated_delta_kernel  # noqa: E402
from hybridspec.recurrence.kernels import ssd as ssd_kernel  # noqa: E402


def on_device(verify: Callable) -> Callable:
    """The kernel for blocks on the CPU: there and back again."""

    def run(**arguments: Tensor | None) -> tuple[Tensor, Tape]:
        moved = {name: None if x is None else x.to(DEVICE) for name, x in arguments.items()}
        outputs, tape = verify(**moved)
        return outputs.cpu(), Tape(*(x.cpu() for x in tape))

    return run


FAMILIES = {
    "gated delta rule": (test_gated_delta.make_block, gated_delta_kernel.verify),
    "SSD": (test_ssd.make_block, ssd_kernel.verify),
}


@st.composite
def blocks(draw: st.DrawFn, name: str) -> Block:
    """Heads of no round size, wider and narrower than what one program takes; every kind of decay."""
    torch.manual_seed(draw(st.integers(0, 2**31)))
    make, kernel = FAMILIES[name]
    # The interpreter takes 10 ms for each token of each program.
    batch, groups, heads = draw(st.sampled_from([(1, 1, 1), (1, 1, 2), (1, 2, 1), (2, 1, 1)]))
    tokens = draw(st.integers(1, 17))
    sizes = (draw(st.integers(1, 11)), draw(st.integers(1, 11)))
    if name == "SSD":
        kinds = tuple(draw(st.sampled_from(sorted(table))) for table in (recurrences.STEPS, test_ssd.RATES))
        block = make((batch, groups, heads, tokens), sizes, kinds, draw(st.sampled_from([None, "usual", "large"])))
    else:
        tables = (recurrences.KEYS, recurrences.DECAYS, recurrences.BETAS)
        kinds = tuple(draw(st.sampled_from(sorted(table))) for table in tables)
        block = make((batch, groups * heads, tokens), sizes, kinds, draw(st.booleans()))
    return replace(block, family=replace(block.family, verify=on_device(kernel)))


each_kernel = pytest.mark.parametrize("name", list(FAMILIES))


@each_kernel
@examples(12)
@given(data=st.data())
def test_outputs_and_every_rollback_equal_the_token_by_token_rule(name: str, data: st.DataObject) -> None:
    recurrences.check_outputs_and_every_rollback(data.draw(blocks(name)))


@dataclass(frozen=True)
class Case:
    """A block of ``heads`` in ``groups``, with key and value (or head and state) ``sizes``."""

    batch: int
    groups: int
    heads: int
    tokens: int
    sizes: tuple[int, int]
    dtype: torch.dtype = torch.float32
    state: bool = True


CASES = [
    Case(2, 1, 2, 1, (8, 16)),
    Case(1, 2, 4, 5, (5, 11)),
    Case(2, 1, 3, 4, (9, 3), torch.bfloat16),
    Case(1, 1, 2, 17, (3, 8), torch.bfloat16),
    Case(1, 1, 2, 7, (24, 4), torch.bfloat16, state=False),
    Case(1, 1, 1, 32, (16, 8)),
]


def grouped_arguments(name: str, case: Case) -> dict:
    """As models have them: tokens before heads, channels that do not lie side by side."""
    torch.manual_seed(case.tokens)
    first, second = case.sizes

    def spread(count: int, size: int) -> Tensor:
        dense = torch.randn(case.batch, count * size, case.tokens).to(case.dtype)
        return dense.transpose(1, 2).unflatten(-1, (count, size)).transpose(1, 2)

    step = torch.rand(case.batch, case.tokens, case.heads).transpose(1, 2)
    if name == "SSD":
        arguments = {
            "inputs": spread(case.heads, first),
            "step": step,
            "rate": -torch.arange(1.0, case.heads + 1),
            "write": spread(case.groups, second),
            "read": spread(case.groups, second),
        }
    else:
        arguments = {
            "query": spread(case.groups, first),
            "key": spread(case.groups, first),
            "value": spread(case.heads, second),
            "log_decay": -step,
            "beta": torch.rand(case.batch, case.tokens, case.heads).to(case.dtype).transpose(1, 2),
        }
    arguments["state"] = torch.randn(case.batch, case.heads, first, second) if case.state else None
    return {n: None if x is None else x.to(DEVICE) for n, x in arguments.items()}


def twin(name: str, arguments: dict) -> tuple[Tensor, Tape]:
    """The torch form on what the kernel takes: in fp32, normalised, a key for each head."""
    arguments = {n: None if x is None else x.float() for n, x in arguments.items()}
    if name == "SSD":
        return ssd.verify(**arguments)
    heads = arguments["value"].shape[1] // arguments["key"].shape[1]
    for which in ("query", "key"):
        arguments[which] = gated_delta.l2_normalise(arguments[which]).repeat_interleave(heads, 1)
    arguments["query"] = arguments["query"] * 0.3
    return gated_delta.verify(**arguments)


@each_kernel
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.tokens} tokens")
def test_outputs_tape_and_final_state_equal_the_torch_form(name: str, case: Case) -> None:
    """Grouped heads, strides, half precision; the state after the block, written in its own place."""
    arguments = grouped_arguments(name, case)
    more = {} if name == "SSD" else {"scale": 0.3, "normalise": True}
    expected, expected_tape = twin(name, arguments)
    after = rollback(arguments["state"], expected_tape, case.tokens)
    state = arguments["state"]
    final = torch.full_like(after, torch.nan) if state is None else state
    outputs, tape = FAMILIES[name][1](**arguments, **more, final=final)
    pairs = {"outputs": (outputs, expected), "state after the block": (final, after)}
    pairs |= dict(zip(Tape._fields, zip(tape, expected_tape, strict=True), strict=True))
    for what, (actual, wanted) in pairs.items():
        assert_near(actual.cpu(), wanted.cpu(), max(1.0, wanted.abs().max().item()), what)


def test_outputs_of_the_delta_rule_come_in_the_dtype_asked_for() -> None:
    arguments = grouped_arguments("gated delta rule", Case(1, 1, 1, 3, (8, 8), torch.bfloat16))
    whole, _ = gated_delta_kernel.verify(**arguments)
    half, tape = gated_delta_kernel.verify(**arguments, dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16
    # The interpreter cuts off where a GPU rounds.
    assert ((half.float() - whole).abs() <= 2**-7 * whole.abs()).all()
    assert {x.dtype for x in tape} == {torch.float32}


@pytest.mark.parametrize("name", ["qwen3_next", "bamba"])
def test_a_model_computes_the_same_with_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the model's projections to its logits: what the adapters hand to the kernels, and what they make of it."""
    runner: TargetRunner = families.family_runner(name, "tape")
    module = ssd_kernel if name == "bamba" else gated_delta_kernel
    ran: list[int] = []
    kernel = module.verify
    monkeypatch.setattr(module, "verify", lambda *a, **o: ran.append(1) or kernel(*a, **o))
    prompt, block = families.some_tokens(2), families.some_tokens(2, seed=8)
    model = runner.model.to(DEVICE)
    logits = {}
    try:
        for choice in ("torch", "triton"):
            monkeypatch.setenv(kernels.VARIABLE, choice)
            with runner.start(prompt) as session:
                first = session.verify(block)
                session.commit(1)
                logits[choice] = torch.cat([first, session.verify(block[:1])])
            assert bool(ran) == (choice == "triton")
    finally:
        model.to("cpu")
    assert_close(logits["triton"].cpu(), logits["torch"].cpu(), "logits")


@pytest.mark.parametrize(
    "choice, on_cpu",
    [("auto", False), ("torch", False), ("triton", True), (None, False)],
)
def test_the_choice_of_kernels(choice: str | None, on_cpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(kernels.VARIABLE, raising=False)
    if choice is not None:
        monkeypatch.setenv(kernels.VARIABLE, choice)
    assert kernels.chosen(torch.empty(0)) is on_cpu


def test_an_unknown_choice_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernels.VARIABLE, "cuda")
    with pytest.raises(InputError, match="HYBRIDSPEC_KERNELS='cuda' is unknown: set it to one of auto, torch, triton"):
        kernels.chosen(torch.empty(0))


#: Built for a GPU of compute capability 9.0 at the dimensions of Qwen3.5-27B and Nemotron-H, in bf16. Reads the use of
#: registers from the machine code: a kernel that spills keeps its state in slow memory.
COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from hybridspec.recurrence.kernels import gated_delta, ssd

HALF = {"query", "key", "value", "beta", "inputs", "write", "read"}
WHOLE = {"log_decay", "state", "tape_key", "tape_write", "final", "step", "rate", "tape_decay", "tape_scaled",
         "outputs"}

def build(kernel, **constants):
    kinds = {n: "*bf16" if n in HALF else "*fp32" if n in WHOLE else "fp32" if n == "scale" else "i32"
             for n in kernel.arg_names} | dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, kinds, constants)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1})
    assert built.asm["cubin"]
    assert ".local" not in built.asm["ptx"]

build(gated_delta._verify, HAS_STATE=True, HAS_FINAL=True, NORMALISE=True, EPSILON=1e-6, BLOCK_K=128,
      BLOCK_V=gated_delta.TILE)
build(ssd._verify, HAS_STATE=True, HAS_FINAL=True, BLOCK_P=ssd.TILE, BLOCK_N=128)
"""


def test_the_kernels_compile_for_a_gpu_that_is_not_there(tmp_path: object) -> None:
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
