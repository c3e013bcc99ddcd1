"""Training: one loop, recipes for it, and the data they read."""
