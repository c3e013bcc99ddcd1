"""Benchmarks: tasks, harness, metrics, reports."""
