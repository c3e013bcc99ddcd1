"""Workers that run in the peers' environments, without forerun."""
