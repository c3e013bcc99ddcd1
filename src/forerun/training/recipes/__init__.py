"""Recipes: one file per model or drafter that can be trained."""
