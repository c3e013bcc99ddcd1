"""Online distillation: corrections by the target, what is learned from them, replays of traffic."""
