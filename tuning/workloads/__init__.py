"""Workloads: named sets of prompts from files, folders, data sets and the package itself."""

from hybridspec.tuning.workloads.sources import (
    Prompt,
    Workload,
    WorkloadSource,
    choose_prompts,
    find_workload,
    find_workloads,
    load_workload,
)

__all__ = [
    "Prompt",
    "Workload",
    "WorkloadSource",
    "choose_prompts",
    "find_workload",
    "find_workloads",
    "load_workload",
]
