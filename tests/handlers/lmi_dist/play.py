"""Drives a ModelRunner greedily with plans built by hand: requests join, are computed in chunks, and leave."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from handlers.lmi_dist.model_runner import ModelRunner
from handlers.lmi_dist.placement import choose_placement
from handlers.lmi_dist.plan import Chunk, Plan
from handlers.lmi_dist.scheduler import CHUNK_LENGTH
from handlers.lmi_dist.weights import read_facts
from lmi.executor import Progress
from lmi.settings.config import EngineConfig


def load_runner(
    path: str | Path,
    config: EngineConfig | None = None,
    *,
    num_slots: int,
    max_length: int,
    progress: Progress = lambda stage, share: None,
) -> ModelRunner:
    """The runner that the executor would make, with the test's limits."""
    facts, config = read_facts(str(path)), config or EngineConfig()
    placement = choose_placement(config, facts.dtype)
    return ModelRunner(facts, placement, config, num_slots=num_slots, max_length=max_length, progress=progress)


@dataclass
class Player:
    """One request: its prompt, then its own best tokens. `logits` has one row for each answer."""

    prompt: list[int]
    num_answers: int
    slot: int = -1
    chunks: list[Chunk] = field(default_factory=list)
    position: int = 0
    answers: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)

    def sit(self, slot: int) -> None:
        self.slot, self.position = slot, len(self.prompt)
        starts = range(0, len(self.prompt), CHUNK_LENGTH)
        self.chunks = [Chunk(slot, start, self.prompt[start : start + CHUNK_LENGTH], 0) for start in starts]
        self.chunks[-1].num_logits = 1

    def take(self, logits: Tensor) -> None:
        self.logits.append(logits.clone())
        self.answers.append(int(logits.argmax()))

    def next_decode(self) -> Chunk:
        chunk = Chunk(self.slot, self.position, [self.answers[-1]])
        self.position += 1
        return chunk

    @property
    def is_done(self) -> bool:
        return len(self.answers) == self.num_answers


def play_alone(runner: ModelRunner, player: Player, slot: int = 0) -> Player:
    """Run one step for each chunk and each token, with an otherwise empty batch."""
    player.sit(slot)
    for chunk in player.chunks:
        logits = runner.forward(Plan([], [chunk]))
    player.take(logits[0])
    while not player.is_done:
        player.take(runner.forward(Plan([player.next_decode()], []))[0])
    runner.release(slot)
    return player


def play_together(
    runner: ModelRunner, players: list[Player], num_slots: int, seed: int, *, start_together: bool = False
) -> int:
    """Draw arrivals, slots and the number of chunks a step at random. Return the largest number of decodes in one step.

    With `start_together` no player decodes before all prompts are in, so that the first decodes fill every slot.
    """
    draw = random.Random(seed)
    waiting, seated, free, most = list(players), dict[int, Player](), list(range(num_slots)), 0
    while waiting or seated:
        for _ in range(num_slots if start_together else draw.choice([0, 1, 4, num_slots])):
            if waiting and free:
                slot = free.pop(draw.randrange(len(free)) if draw.random() < 0.3 else free.index(min(free)))
                seated[slot] = waiting.pop(0)
                seated[slot].sit(slot)
        decodes = [seated[slot] for slot in sorted(seated) if not seated[slot].chunks]
        if start_together and len(decodes) < len(seated):
            decodes = []
        prefills: list[tuple[Player, Chunk]] = []
        for player in (seated[slot] for slot in sorted(seated) if seated[slot].chunks):
            for _ in range(draw.randint(0, 3)):
                if player.chunks and len(prefills) < 6:
                    prefills.append((player, player.chunks.pop(0)))
        if not decodes and not prefills:
            continue
        most = max(most, len(decodes))
        logits = runner.forward(Plan([player.next_decode() for player in decodes], [chunk for _, chunk in prefills]))
        asked = decodes + [player for player, chunk in prefills if chunk.num_logits]
        for player, row_logits in zip(asked, logits, strict=True):
            player.take(row_logits)
            if player.is_done:
                del seated[player.slot]
                free.append(player.slot)
                runner.release(player.slot)
    return most


def random_players(vocab_size: int, lengths: list[int], num_answers: int, seed: int = 0) -> list[Player]:
    draw = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(3, vocab_size, (length,), generator=draw).tolist() for length in lengths]
    return [Player(prompt, num_answers) for prompt in prompts]
