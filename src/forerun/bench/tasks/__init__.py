"""Tasks: problems with an exact checker, for evaluation and training."""
