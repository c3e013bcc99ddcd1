"""Parts of benchmarks/gpu.py: each runs in a process of its own under its own time limit."""
