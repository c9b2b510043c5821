"""What runs the models for a study: one small interface, whatever engine stands behind it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hybridspec.acceptance_counts import AcceptanceCounts
from hybridspec.decoding.timed_generation import TimedGeneration
from hybridspec.tuning.configuration import Configuration

#: ``(what is running, share done)``
Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Sample:
    """One prompt decoded plainly and by a configuration, in turn; seconds without prefill.

    ``steps``: (drafted, accepted) of each step.
    """

    prompt: str
    plain_seconds: float
    plain_cpu_seconds: float
    plain_tokens: int
    seconds: float
    cpu_seconds: float
    tokens: int
    steps: tuple[tuple[int, int], ...] = ()
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0

    @classmethod
    def of(cls, prompt: str, plain: TimedGeneration, own: TimedGeneration) -> "Sample":
        return cls(
            prompt,
            plain.wall_seconds,
            plain.cpu_seconds,
            plain.timed_tokens,
            own.wall_seconds,
            own.cpu_seconds,
            own.timed_tokens,
            tuple((step.drafted, step.accepted) for step in own.steps),
            own.draft_seconds,
            own.verify_seconds,
        )


@dataclass(frozen=True)
class DraftSurvey:
    """What a run at the longest K showed of one draft: by position, in how many steps it was drafted and accepted.

    ``cost``: one drafted token / one plain step.
    """

    drafted: list[int]
    accepted: list[int]
    cost: float

    @classmethod
    def of(cls, counts: AcceptanceCounts, cost: float) -> "DraftSurvey":
        return cls(list(counts.drafted), list(counts.accepted), cost)


@dataclass(frozen=True)
class Survey:
    """One measurement of a workload that predicts every configuration.

    ``verify_ratio[k]``: target pass over k + 1 tokens / plain step. ``rollback_ratio`` likewise, by draft. Where an
    engine does not tell drafting from verifying, all that a drafted token adds is the draft's ``cost``.
    """

    target_step_seconds: float
    verify_ratio: list[float]
    rollback_ratio: dict[str, float]
    drafts: dict[str, DraftSurvey]
    predicted: dict[Configuration, float] = field(default_factory=dict)


class Backend(ABC):
    """Opened for one workload; a context manager."""

    #: In profiles and on the command line.
    name: str
    #: Told what runs while :meth:`measure` works; set by the study.
    progress: Progress = staticmethod(lambda *_: None)
    #: Further prompts that can be measured where an answer lies inside the noise.
    more: int = 0

    def __enter__(self) -> "Backend":
        return self

    def __exit__(self, *_: object) -> None:
        return

    @abstractmethod
    def survey(self, configurations: Sequence[Configuration], progress: Progress) -> Survey:
        """Runs each draft once at the longest K and predicts every configuration."""

    @abstractmethod
    def measure(
        self, configuration: Configuration, on_sample: Callable[[int, Sample], None], more: bool = False
    ) -> list[Sample]:
        """Decodes every prompt plainly and by ``configuration``, or with ``more`` the further ones in their place.
        ``on_sample(index, sample)`` may raise to stop.
        """
