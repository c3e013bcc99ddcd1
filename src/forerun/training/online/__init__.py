"""Online distillation: corrections by the target, what is learned from them, replays of traffic."""

from typing import TYPE_CHECKING

from forerun.utils.renamed import renamed

if not TYPE_CHECKING:
    __getattr__ = renamed(
        __name__,
        **{
            name: f"training.online.learner.{name}"
            for name in ("Learner", "OnlineLearner", "OnlineOptions")
        },
    )
