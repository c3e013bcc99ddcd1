"""Draft models: prompts and texts, shapes, losses, phases, acceptance, cards."""
