"""Workloads, models and the demo. Run its modules from the repository root."""
