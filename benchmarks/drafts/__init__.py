"""Training of draft models: the parts of benchmarks/drafts/run.py."""
