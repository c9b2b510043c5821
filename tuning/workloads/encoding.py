"""Prompts as the target's token ids: text as it is, chat messages through the tokenizer's template."""

from dataclasses import dataclass

from hybridspec.decoding.loop import check_length
from hybridspec.decoding.target import Target
from hybridspec.errors import ContextLengthError, InputError
from hybridspec.tuning.workloads.sources import Prompt, Workload, preference


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt and its token ids on one target."""

    prompt: Prompt
    tokens: tuple[int, ...]

    @property
    def id(self) -> str:
        return self.prompt.id


def encode_prompt(target: Target, prompt: Prompt) -> list[int]:
    """Token ids of a prompt; of messages with the opening of the answer behind them.

    Raises:
        InputError: messages for a tokenizer without a chat template, or that its template refuses; or no token at all.
    """
    if not prompt.messages:
        return target.encode(prompt.text)
    tokenizer = target.tokenizer
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        raise InputError(
            f"the tokenizer of {target.name} has no chat template, so it cannot take messages. Give prompts as text "
            "with the model's own markers in them, or copy chat_template.jinja into the model's folder."
        )
    try:
        text = tokenizer.apply_chat_template(list(prompt.messages), tokenize=False, add_generation_prompt=True)
    except Exception as error:
        # Templates raise what they like: wrong order of roles, fields that are not there.
        raise InputError(f"the chat template of {target.name} refuses the messages: {error}") from error
    # The template writes the special tokens itself.
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not tokens:
        raise InputError(f"the messages give no token with the tokenizer of {target.name}")
    return tokens


def encode_workload(
    target: Target, workload: Workload, count: int, max_new_tokens: int, max_k: int
) -> list[EncodedPrompt]:
    """The prompts of a workload that are to be measured, in the order of the file.

    With ``skip_unusable``, other prompts stand in for those that do not fit.

    Args:
        count, max_new_tokens: where the workload does not say.
        max_k: greatest K; a block must fit behind the prompt.

    Raises:
        ContextLengthError: a prompt does not fit into the context, or none does; names workload and prompt.
        InputError: a prompt that cannot be encoded; names them likewise.
    """
    count, length = workload.count or count, workload.max_new_tokens or max_new_tokens
    encoded: dict[int, EncodedPrompt] = {}
    first_refusal = ""
    order = preference(len(workload.prompts), count, workload.seed)
    for index in order:
        if len(encoded) == count:
            break
        prompt = workload.prompts[index]
        where = f"workload {workload.name}, prompt {prompt.id}"
        try:
            tokens = encode_prompt(target, prompt)
            check_length(target, tokens, length, max_k)
        except ContextLengthError as error:
            first_refusal = first_refusal or f"{where}: {error}"
            if not workload.skip_unusable:
                raise ContextLengthError(f"{where}: {error} (skip_unusable=true leaves such prompts out.)") from error
            continue
        except InputError as error:
            raise InputError(f"{where}: {error}") from error
        encoded[index] = EncodedPrompt(prompt, tuple(tokens))
    if not encoded:
        raise ContextLengthError(
            f"workload {workload.name}: none of its {len(workload.prompts)} prompts fits. First: {first_refusal}"
        )
    return [encoded[index] for index in sorted(encoded)]
