"""What constraints are measured on, and the parts of the benchmark: see run.py."""
