"""Profiles made by hand, for what reads them: no model runs."""

from hybridspec.tuning.configuration import PLAIN, Configuration
from hybridspec.tuning.profile import SCHEMA, Profile
from hybridspec.tuning.profile_building import describe_configuration

DRAFTS = ("same-architecture:draft-2-layers", "same-architecture:draft-4-layers", "prompt-lookup")
LONGEST = 8


def trial(configuration: Configuration, speedup: float, width: float = 0.1, prompts: int = 3) -> dict:
    return {
        **describe_configuration(configuration),
        "pruned": False,
        "speedup": speedup,
        "interval": [speedup - width, speedup + width],
        "acceptance_rate": 0.4,
        "acceptance_length": 2.1,
        "acceptance_by_position": [0.6, 0.3],
        "prompts": prompts,
        "draft_length": 3.5,
        "tokens_per_second": 40.0 * speedup,
    }


def workload(
    speedup: float | None = 1.5, drafts: tuple[str, ...] = DRAFTS, longest: int = LONGEST, share: float = 0.7
) -> dict:
    """One whose best is ``drafts[0]`` with K = 2 at ``speedup``; under 1 plain decoding is chosen.

    ``speedup`` None: surveyed, nothing tried yet.
    """
    best = Configuration(drafts[0], "2")
    won = speedup is not None and speedup > 1
    chosen = best if won else PLAIN
    curves = {draft: [share ** (position + 1) for position in range(longest)] for draft in drafts}
    predicted = [
        {
            **describe_configuration(Configuration(draft, rule)),
            "speedup": max(0.3, 1.3 - 0.06 * abs(i - 2) - 0.05 * drafts.index(draft)),
        }
        for draft in drafts
        for i, rule in enumerate([*map(str, range(1, longest + 1)), "expected-gain", "svip"])
    ]
    trials = [] if speedup is None else [trial(best, speedup), trial(Configuration(drafts[0], "svip"), speedup - 0.2)]
    if trials and len(drafts) > 1:
        trials.append({**describe_configuration(Configuration(drafts[1], "4")), "pruned": True})
    return {
        "settings": {"longest": LONGEST, "max_new_tokens": 48, "temperature": 0.0},
        "complete": speedup is not None,
        "stopped": "every configuration was measured" if speedup is not None else None,
        "chosen": None if speedup is None else describe_configuration(chosen),
        "reason": None if speedup is None else "the fastest of those measured" if won else "the best loses",
        "best_k": None if speedup is None else 2 if won else 0,
        "speedup": speedup if won else None if speedup is None else 1.0,
        "speedup_interval_90": [speedup - 0.1, speedup + 0.1] if won else None,
        "cpu_speedup": speedup if won else None,
        "acceptance_rate": 0.4 if won else None,
        "acceptance_length": 2.1 if won else None,
        "ideal_speedup": 1.1 * speedup if won else None,
        "efficiency": 0.91 if won else None,
        "acceptance": {
            draft: {
                "by_position": curve,
                "interval_90": [[max(0.0, s - 0.05), min(1.0, s + 0.05)] for s in curve],
                "steps": 100,
            }
            for draft, curve in curves.items()
        },
        "costs": {
            "target_step_seconds": 0.02,
            "draft_ratio": dict.fromkeys(drafts, 0.1),
            "verify_ratio_by_k": [0.9 + 0.08 * k for k in range(longest + 1)],
            "rollback_ratio": dict.fromkeys(drafts, 0.15),
        },
        "predicted": predicted,
        "prediction_error_median": 0.04 if trials else None,
        "trials": trials,
        "by_concurrency": None,
        "vllm": {"speculative_config": {"num_speculative_tokens": 2}} if won else None,
    }


def at_once(k: int, speedup: float | None = None) -> dict:
    """What is best at one number of requests at a time."""
    unknown = ("interval_90", "acceptance", "acceptance_length", "tokens_per_second", "predicted")
    return dict.fromkeys(unknown) | {"k": k, "draft": DRAFTS[0], "speedup": speedup, "reason": "the fastest"}


def unmeasured() -> dict:
    """Interrupted before its survey was done."""
    empty = {"acceptance": {}, "costs": None, "predicted": [], "acceptance_rate": None, "acceptance_length": None}
    return workload(None) | empty


def profile(workloads: dict[str, dict], drafts: tuple[str, ...] = DRAFTS, hybridspec: str = "0.1.0") -> Profile:
    return Profile.model_validate(
        {
            "schema": SCHEMA,
            "hybridspec": hybridspec,
            "created": "2026-01-02T03:04:05+00:00",
            "backend": "torch",
            "target": {
                "name": "target",
                "path": None,
                "fingerprint": "0123456789abcdef",
                "dtype": "float32",
                "layers": {"linear_attention": 18, "full_attention": 6},
            },
            "drafts": {draft: {"name": draft} for draft in drafts},
            "machine": {"system": "Linux", "cores": 2, "load_average": 0.5, "torch": "2.13.0"},
            "settings": {"longest": LONGEST, "prompts": 3, "seconds": None},
            "workloads": workloads,
        }
    )
