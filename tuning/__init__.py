"""The tuner: workloads, paired measurement, cost model, study, profile."""
