"""Integrations with transformers, vLLM and Ray."""
