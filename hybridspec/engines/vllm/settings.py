"""Settings of the proposer, as they stand in vLLM's ``--additional-config``."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

from hybridspec.errors import InputError
from hybridspec.runtime.options import LoadOptions, load_options

#: Where the settings stand, for messages.
PLACE = '--additional-config "hybridspec"'
#: Those that are fields of :class:`~hybridspec.runtime.options.LoadOptions`.
LOAD_SETTINGS = ("device", "dtype", "rollback")


@dataclass(frozen=True)
class ProposerSettings:
    """``additional_config["hybridspec"]``.

    Args:
        draft: a checkpoint folder, or a strategy with options: ``prompt-lookup:longest=3``.
        length: a draft-length rule; default: always ``num_speculative_tokens``.
        max_sequences: most requests that hold draft state; default: vLLM's ``max_num_seqs``.
        idle_seconds: after so long without a request all state is freed.
        load: how a draft model is loaded. ``device``, ``dtype`` and ``rollback`` are settings; the first two are the
            target's by default.

    Raises:
        InputError: a value is of the wrong kind; names it.
    """

    draft: str
    length: str | int | None = None
    max_sequences: int | None = None
    idle_seconds: float = 60.0
    load: LoadOptions = LoadOptions()

    def __post_init__(self) -> None:
        if not isinstance(self.draft, str) or not self.draft:
            raise InputError(f"{PLACE}: draft must be a folder or a strategy, not {self.draft!r}")
        count = self.max_sequences
        if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
            raise InputError(f"{PLACE}: max_sequences must be a whole number of at least 1, not {count!r}")
        if not isinstance(self.idle_seconds, int | float) or not self.idle_seconds > 0:
            raise InputError(f"{PLACE}: idle_seconds must be a number above 0, not {self.idle_seconds!r}")

    @classmethod
    def read(cls, additional_config: object, defaults: LoadOptions) -> "ProposerSettings":
        """The settings, with ``defaults`` for how a draft model is loaded.

        Raises:
            InputError: there are none, or one does not exist or has no such value.
        """
        found = additional_config.get("hybridspec") if isinstance(additional_config, Mapping) else None
        if not isinstance(found, Mapping) or "draft" not in found:
            raise InputError('--additional-config needs {"hybridspec": {"draft": "<checkpoint folder or strategy>"}}')
        known = [*(f.name for f in fields(cls) if f.name != "load"), *LOAD_SETTINGS]
        unknown = [name for name in found if name not in known]
        if unknown:
            raise InputError(f"{PLACE}: {unknown[0]!r} is no setting. It takes {', '.join(known)}.")
        given = {name: found[name] for name in LOAD_SETTINGS if found.get(name) is not None}
        try:
            load = load_options(defaults, **given)
        except InputError as error:
            raise InputError(f"{PLACE}: {error}") from error
        return cls(**{name: value for name, value in found.items() if name not in LOAD_SETTINGS}, load=load)
