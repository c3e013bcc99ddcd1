"""forerun inside other people's loops."""
