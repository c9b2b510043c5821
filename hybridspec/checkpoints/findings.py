"""What a check hands back: findings with stable codes, and the facts that they stand on."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from hybridspec.checkpoints.codes import CODES, Severity

Subject = Literal["target", "draft", "pair"]
ORDER: dict[str, int] = {"error": 0, "warning": 1, "note": 2}
#: Raised when fields of the JSON change their meaning; new fields do not raise it.
FORMAT_VERSION = 1


@dataclass(frozen=True)
class Finding:
    """One thing that a check saw.

    Attributes:
        code: stable; :data:`~hybridspec.checkpoints.codes.CODES` tells what it means.
        subject: whose files it is about.
        seen: what stands there, in one sentence.
        file: relative to the checkpoint's folder.
        field: a key of that file, or a tensor's name.
        severity: the code's own unless this case is milder.
        action: what to do; the code's own unless this case has a better one.
    """

    code: str
    subject: Subject
    seen: str
    file: str | None = None
    field: str | None = None
    severity: Severity = ""  # type: ignore[assignment]
    action: str = ""

    def __post_init__(self) -> None:
        known = CODES[self.code]
        object.__setattr__(self, "severity", self.severity or known.severity)
        object.__setattr__(self, "action", self.action or known.action)

    @property
    def title(self) -> str:
        return CODES[self.code].title

    @property
    def why(self) -> str:
        return CODES[self.code].why

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"title": self.title, "why": self.why}


@dataclass
class Report:
    """The outcome of :func:`hybridspec.check`.

    Attributes:
        target: facts about the target's checkpoint: path, model type, layers, tokenizer, sizes.
        draft: the same about the draft's; None if none was given.
        findings: errors first.
        memory: state and key-value bytes of the target, and what fits; None if its layers are not known.
        engines: one row per engine and draft method that the support matrix knows for this pair.
        run: what :mod:`hybridspec.tuning.model_checks` measured; None if it did not run.
    """

    target: dict[str, Any]
    draft: dict[str, Any] | None = None
    findings: list[Finding] = field(default_factory=list)
    memory: dict[str, Any] | None = None
    engines: list[dict[str, Any]] = field(default_factory=list)
    run: dict[str, Any] | None = None

    def add(self, findings: Iterable[Finding]) -> None:
        self.findings.extend(findings)
        self.findings.sort(key=lambda f: (ORDER[f.severity], f.code, f.subject != "target"))

    def of(self, severity: Severity) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity == severity]

    @property
    def errors(self) -> list[Finding]:
        return self.of("error")

    @property
    def warnings(self) -> list[Finding]:
        return self.of("warning")

    @property
    def codes(self) -> list[str]:
        return [finding.code for finding in self.findings]

    @property
    def unreadable(self) -> bool:
        """Some file could not be read, so that the rest says less than it looks."""
        return any(CODES[finding.code].unreadable for finding in self.errors)

    def exit_status(self, strict: bool = False) -> int:
        """0: nothing wrong. 1: errors (with ``strict``, warnings too). 2: something could not be read."""
        if self.unreadable:
            return 2
        return int(bool(self.errors or (strict and self.warnings)))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "format_version": FORMAT_VERSION,
            "exit_status": self.exit_status(),
            "counts": {severity: len(self.of(severity)) for severity in ("error", "warning", "note")},
            "findings": [finding.to_dict() for finding in self.findings],
            "target": self.target,
            "draft": self.draft,
            "memory": self.memory,
            "engines": self.engines,
            "run": self.run,
        }
