"""Prompts as token ids: chat templates, and prompts that do not fit the context."""

import pytest

from hybridspec import TargetRunner, embedded
from hybridspec.decoding.target import EngineTarget
from hybridspec.errors import ContextLengthError, InputError
from hybridspec.tuning.workloads.encoding import encode_prompt, encode_workload
from hybridspec.tuning.workloads.sources import Prompt, Workload, find_workload


@pytest.fixture(scope="module")
def target() -> TargetRunner:
    return TargetRunner.from_pretrained(embedded.TARGET)


@pytest.mark.parametrize("workload", ["chat_qa", "math", "summarise", "long_context"])
def test_messages_give_the_tokens_of_the_same_chat_written_out(target: TargetRunner, workload: str) -> None:
    texts = find_workload(workload).prompts
    chats = find_workload(f"{workload}:chat=true").prompts
    for text, chat in zip(texts, chats, strict=True):
        assert text.id == chat.id and not chat.text and "<|" not in chat.messages[0]["content"]
        assert encode_prompt(target, chat) == encode_prompt(target, text) == target.encode(text.text)


def test_messages_need_a_template_that_takes_them(target: TargetRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = Prompt("p", messages=({"role": "user", "content": "a"},))
    monkeypatch.setattr(target.tokenizer, "chat_template", "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InputError, match="refuses the messages: roles must alternate"):
        encode_prompt(target, chat)
    monkeypatch.setattr(target.tokenizer, "chat_template", None)
    with pytest.raises(InputError, match="workload w, prompt p: .*no chat template"):
        encode_workload(target, Workload("w", (chat,)), 1, 2, 1)


def test_half_a_surrogate_pair_is_refused_before_the_tokenizer(target: TargetRunner) -> None:
    with pytest.raises(InputError, match=r"U\+D800 at character 1"):
        target.encode("a\ud800")


def fake(length: int) -> EngineTarget:
    return EngineTarget("tiny", 2, lambda text: {"input_ids": [int(w) for w in text.split()]}, length)


PROMPTS = tuple(Prompt(str(i), "1 " * (20 if i % 2 == 0 else 3)) for i in range(6))


def test_a_prompt_that_does_not_fit_is_named() -> None:
    with pytest.raises(ContextLengthError, match=r"workload w, prompt 0: .*20 tokens.*skip_unusable"):
        encode_workload(fake(16), Workload("w", PROMPTS), 2, 8, 4)
    with pytest.raises(ContextLengthError, match="prompt 0: .*and 9 new ones"):
        encode_workload(fake(28), Workload("w", PROMPTS, max_new_tokens=9), 2, 8, 4)


@pytest.mark.parametrize("seed", [None, 1])
def test_others_stand_in_for_prompts_that_do_not_fit(seed: int | None) -> None:
    workload = Workload("w", PROMPTS, skip_unusable=True, seed=seed)
    chosen = encode_workload(fake(16), workload, 3, 8, 4)
    assert [e.id for e in chosen] == ["1", "3", "5"]
    assert all(e.tokens == (1, 1, 1) for e in chosen)
    with pytest.raises(ContextLengthError, match="none of its 6 prompts fits. First: workload w, prompt"):
        encode_workload(fake(8), workload, 3, 8, 4)


def test_the_workload_says_how_many_before_the_command_does() -> None:
    assert [e.id for e in encode_workload(fake(100), Workload("w", PROMPTS, count=2), 5, 8, 4)] == ["0", "3"]
