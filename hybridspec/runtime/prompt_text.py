"""Text as token ids, for a model that runs here or elsewhere."""

from transformers import PreTrainedTokenizerBase

from hybridspec.errors import InputError


def encode_text(tokenizer: PreTrainedTokenizerBase | None, text: str, model: str) -> list[int]:
    """Token ids of a prompt, with the special tokens that the tokenizer adds at its start.

    Args:
        model: whose tokenizer it is, for messages.

    Raises:
        InputError: the text is empty or gives no token, or the model came without a tokenizer.
    """
    if not text.strip():
        raise InputError("the prompt is empty: give some text")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        character = f"U+{ord(text[error.start]):04X} at character {error.start}"
        raise InputError(f"the prompt holds half a surrogate pair ({character}), which is no text") from error
    if tokenizer is None:
        raise InputError(f"{model} came without a tokenizer, so it takes token ids only")
    tokens = tokenizer(text)["input_ids"]
    if not tokens:
        raise InputError(f"the prompt {text!r} gives no token with the tokenizer of {model}")
    return tokens
