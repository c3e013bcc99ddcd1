"""What `generate` returns, and streamers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.core.records import Sequence, Step
from forerun.errors import ConfigError
from forerun.integrations.hf_processors import Place, Processors


class TokenStreamer:
    """Listener: passes new tokens of one sequence to a streamer. prompt: put first, if given."""

    def __init__(self, streamer: Any, batch: int, prompt: Tensor | None = None) -> None:
        if not all(callable(getattr(streamer, name, None)) for name in ("put", "end")):
            raise ConfigError(
                f"stream_to must be a streamer with put and end, got {streamer!r}; use e.g. "
                "transformers' TextStreamer(tokenizer)"
            )
        if batch > 1:
            raise ConfigError(f"a streamer needs batch size 1, got {batch}")
        self.streamer = streamer
        if prompt is not None:
            streamer.put(prompt.cpu())

    def __call__(self, step: Step) -> None:
        for token in step.emitted[0]:
            self.streamer.put(torch.tensor([token]))

    def end(self) -> None:
        """The text is complete."""
        self.streamer.end()


class OutputRecorder:
    """Listener: builds the return value of generate, with scores and logits if requested."""

    def __init__(self, processors: Processors, config: Any) -> None:
        self.processors, self.config = processors, config
        wants = config.return_dict_in_generate
        self.wants_scores, self.wants_logits = (
            bool(wants and flag) for flag in (config.output_scores, config.output_logits)
        )

    def __call__(self, step: Step) -> None:
        if not (self.wants_scores or self.wants_logits):
            return
        for i, seq in enumerate(step.seqs):
            rows, laws = seq.scratch.setdefault(self, []), step.laws[i]
            first = len(seq.tokens) - len(step.emitted[i]) - seq.num_prompt
            for count, node in enumerate(step.visited(i), start=first):
                logits = laws.rows.row(node).astype(np.float32)
                inner = next((state.inner for state in laws.states(node)), None)
                state = Place((seq.index, *seq.generated[:count]), inner)
                scores = self.processors.scores(state, logits) if self.wants_scores else None
                rows.append((scores, torch.from_numpy(logits)))

    def outputs(self, input_ids: Tensor, seqs: list[Sequence], pad: int) -> Any:
        """Ids [B, L + new], padded on the right, or an output object of transformers."""
        most = max(seq.num_generated for seq in seqs)
        made = torch.full((len(seqs), most), pad, dtype=input_ids.dtype)
        for row, seq in zip(made, seqs, strict=True):
            row[: seq.num_generated] = torch.tensor(seq.tokens[seq.num_prompt :])
        ids = torch.cat([input_ids, made.to(input_ids.device)], dim=1)
        if not self.config.return_dict_in_generate:
            return ids
        from transformers.generation.utils import GenerateDecoderOnlyOutput

        parts: dict[str, Any] = {
            "sequences": ids,
            "scores": self._stacked(seqs, 0, ids.device) if self.wants_scores else None,
            "logits": self._stacked(seqs, 1, ids.device) if self.wants_logits else None,
        }
        return GenerateDecoderOnlyOutput(**parts)

    def _stacked(self, seqs: list[Sequence], part: int, device: torch.device) -> tuple[Tensor, ...]:
        """Rows [B, V] of every new position; finished sequences repeat their last row."""
        made = []
        for at in range(max(seq.num_generated for seq in seqs)):
            rows = [seq.scratch[self][min(at, seq.num_generated - 1)][part] for seq in seqs]
            made.append(torch.stack(rows).to(device))
        return tuple(made)
