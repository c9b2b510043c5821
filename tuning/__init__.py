"""The tuner: workloads, measurement in turn, cost model, study, profile.

The names below load on first use, so that what reads a configuration or a profile needs no torch.
"""

from importlib import import_module

_WHERE = {
    "Bench": "configuration",
    "Configuration": "configuration",
    "Profile": "profile",
    "StudySettings": "config",
    "TuneConfig": "config",
    "Tuning": "run",
    "WorkloadSource": "workloads",
    "compare_workload": "compare",
    "comparison_frame": "compare",
    "find_workload": "workloads",
    "load_config": "config_file",
    "load_workload": "workloads",
}
__all__ = list(_WHERE)


def __getattr__(name: str) -> object:
    if name not in _WHERE:
        raise AttributeError(f"module 'hybridspec.tuning' has no attribute {name!r}")
    return getattr(import_module(f"hybridspec.tuning.{_WHERE[name]}"), name)
