"""Chat messages as they stand in files: lists of a role and a content, in one of the usual spellings."""

import json
from collections.abc import Mapping

#: ShareGPT's names for the roles.
ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant"}


def read_messages(value: object) -> tuple[dict[str, object], ...]:
    """Messages with ``role`` and ``content``, the way chat templates take them; answers at the end are left out.

    Takes lists of ``{"role", "content"}`` (content: text, or parts of the kind ``{"type": "text", "text"}``), of
    ShareGPT's ``{"from", "value"}``, and such a list as JSON text, which is how it stands in CSV. Other keys, such as
    ``tool_calls``, are handed to the template as they are.

    Raises:
        ValueError: it is none of these; says which message and what is wrong with it.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError("is text, but not a list of messages in JSON") from error
    if not isinstance(value, list) or not value:
        raise ValueError("is not a list of messages")
    messages = [_message(f"message {number}", message) for number, message in enumerate(value, 1)]
    # Data for training ends with the answer; a prompt ends where the model has to answer.
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise ValueError("holds nothing but the assistant's messages")
    return tuple(messages)


def _message(place: str, message: object) -> dict[str, object]:
    if not isinstance(message, Mapping):
        raise ValueError(f'{place} is not an object with "role" and "content"')
    # Tables fill the keys that only some messages have with null.
    message = {key: value for key, value in message.items() if value is not None}
    if "from" in message and "role" not in message:
        role = message.pop("from")
        message = {"role": ROLES.get(role, role), "content": message.pop("value", None), **message}
    if not isinstance(message.get("role"), str):
        raise ValueError(f'{place} has no "role"')
    content = message.get("content", "" if "tool_calls" in message else None)
    if isinstance(content, list):
        content = "".join(_text(place, part) for part in content)
    if not isinstance(content, str):
        raise ValueError(f'{place} has no text as its "content"')
    return {**message, "content": content}


def _text(place: str, part: object) -> str:
    if isinstance(part, Mapping) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    raise ValueError(f"{place} has a part that is not text; images and sound are not supported")
