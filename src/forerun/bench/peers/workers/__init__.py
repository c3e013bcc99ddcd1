"""What runs in the peers' own environments. Nothing here imports forerun."""
