"""Drives a ModelRunner greedily with plans built by hand: requests join, are cut into pieces, and leave."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from handlers.lmi_dist.model_runner import ModelRunner
from handlers.lmi_dist.placement import choose_placement
from handlers.lmi_dist.plan import Piece, Plan
from handlers.lmi_dist.scheduler import PIECE_LENGTH
from handlers.lmi_dist.weights import read_facts
from lmi.executor import Progress
from lmi.settings.config import EngineConfig


def load_runner(
    path: str | Path,
    config: EngineConfig | None = None,
    *,
    num_rows: int,
    max_length: int,
    progress: Progress = lambda stage, share: None,
) -> ModelRunner:
    """The runner that the executor would make, with limits of the test's choice."""
    facts, config = read_facts(str(path)), config or EngineConfig()
    placement = choose_placement(config, facts.dtype)
    return ModelRunner(facts, placement, config, num_rows=num_rows, max_length=max_length, progress=progress)


@dataclass
class Player:
    """One request: its prompt, then its own best tokens. `logits` has one row for each answer."""

    prompt: list[int]
    num_answers: int
    row: int = -1
    pieces: list[Piece] = field(default_factory=list)
    position: int = 0
    answers: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)

    def sit(self, row: int) -> None:
        self.row, self.position = row, len(self.prompt)
        starts = range(0, len(self.prompt), PIECE_LENGTH)
        self.pieces = [Piece(row, start, self.prompt[start : start + PIECE_LENGTH], 0) for start in starts]
        self.pieces[-1].num_logits = 1

    def take(self, logits: Tensor) -> None:
        self.logits.append(logits.clone())
        self.answers.append(int(logits.argmax()))

    def next_decode(self) -> Piece:
        piece = Piece(self.row, self.position, [self.answers[-1]])
        self.position += 1
        return piece

    @property
    def is_done(self) -> bool:
        return len(self.answers) == self.num_answers


def play_alone(runner: ModelRunner, player: Player, row: int = 0) -> Player:
    """One step for each piece and each token, nobody else in the batch."""
    player.sit(row)
    for piece in player.pieces:
        logits = runner.forward(Plan([], [piece]))
    player.take(logits[0])
    while not player.is_done:
        player.take(runner.forward(Plan([player.next_decode()], []))[0])
    runner.release(row)
    return player


def play_together(
    runner: ModelRunner, players: list[Player], num_rows: int, seed: int, *, start_together: bool = False
) -> int:
    """Random arrivals, random rows, random numbers of pieces a step. Returns the largest number of decodes in one.

    With `start_together` nobody goes on before all prompts are in, so that the first decodes fill every row.
    """
    draw = random.Random(seed)
    waiting, seated, free, most = list(players), dict[int, Player](), list(range(num_rows)), 0
    while waiting or seated:
        for _ in range(num_rows if start_together else draw.choice([0, 1, 4, num_rows])):
            if waiting and free:
                row = free.pop(draw.randrange(len(free)) if draw.random() < 0.3 else free.index(min(free)))
                seated[row] = waiting.pop(0)
                seated[row].sit(row)
        decodes = [seated[row] for row in sorted(seated) if not seated[row].pieces]
        if start_together and len(decodes) < len(seated):
            decodes = []
        prefills: list[tuple[Player, Piece]] = []
        for player in (seated[row] for row in sorted(seated) if seated[row].pieces):
            for _ in range(draw.randint(0, 3)):
                if player.pieces and len(prefills) < 6:
                    prefills.append((player, player.pieces.pop(0)))
        if not decodes and not prefills:
            continue
        most = max(most, len(decodes))
        logits = runner.forward(Plan([player.next_decode() for player in decodes], [piece for _, piece in prefills]))
        asked = decodes + [player for player, piece in prefills if piece.num_logits]
        for player, row_logits in zip(asked, logits, strict=True):
            player.take(row_logits)
            if player.is_done:
                del seated[player.row]
                free.append(player.row)
                runner.release(player.row)
    return most


def random_players(vocab_size: int, lengths: list[int], num_answers: int, seed: int = 0) -> list[Player]:
    draw = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(3, vocab_size, (length,), generator=draw).tolist() for length in lengths]
    return [Player(prompt, num_answers) for prompt in prompts]
