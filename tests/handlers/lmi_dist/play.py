"""Drives a runner greedily with plans built by hand: requests join, are computed in chunks, and
leave.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from handlers.lmi_dist.facts import read_facts
from handlers.lmi_dist.limits import Limits
from handlers.lmi_dist.model_runner import ModelRunner
from handlers.lmi_dist.native.library import Library, load
from handlers.lmi_dist.native.records import TOKENS_PER_BLOCK
from handlers.lmi_dist.native_runner import NativeRunner
from handlers.lmi_dist.placement import choose_placement
from handlers.lmi_dist.plan import Chunk, Plan
from handlers.lmi_dist.runner import Runner
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
    """The torch runner that the executor would make, with the test's limits."""
    facts, config = read_facts(str(path)), config or EngineConfig()
    placement = choose_placement(config, "cpu", facts.dtype)
    return ModelRunner(facts, placement, config, Limits(num_slots, max_length, 0), progress)


def forward(runner: Runner, plan: Plan) -> Tensor:
    """A copy of the logits of a step, (num_logits, vocab_size)."""
    return torch.from_numpy(runner.forward(plan).copy())


# Of a native runner
MAX_SLOTS = 64
# Tokens of a prompt in one chunk
PIECE = 128
# Where it is cut at random
PIECES = (1, 2, 5, 17, 64, 130)


def load_native(
    path: str | Path,
    config: EngineConfig | None = None,
    *,
    max_length: int,
    progress: Progress = lambda stage, share: None,
    library: Library | None = None,
) -> NativeRunner:
    """The native runner that the executor would make, with blocks for MAX_SLOTS sequences, on the
    library for this CPU or on another one.
    """
    num_tokens = len(table_of(0, max_length)) * MAX_SLOTS * TOKENS_PER_BLOCK
    facts, config = read_facts(str(path)), config or EngineConfig()
    limits = Limits(MAX_SLOTS, max_length, num_tokens)
    return NativeRunner(facts, library or load(), config, limits, progress)


def table_of(slot: int, length: int) -> list[int]:
    """The blocks of a slot. They lie apart from each other, from the last of the pool
    to the first.
    """
    num_blocks = -(-length // TOKENS_PER_BLOCK)
    return [MAX_SLOTS * block + slot for block in reversed(range(num_blocks))]


@dataclass
class Player:
    """One request: its prompt, then its own best tokens. `logits` has one row for each answer."""

    prompt: list[int]
    num_answers: int
    slot: int = -1
    table: list[int] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    position: int = 0
    answers: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)

    def sit(self, slot: int, draw: random.Random | None = None) -> None:
        """Cut the prompt into chunks, at random with `draw`."""
        self.slot, self.position = slot, len(self.prompt)
        self.table = table_of(slot, len(self.prompt) + self.num_answers)
        self.chunks = []
        start = 0
        while start < len(self.prompt):
            end = start + (PIECE if draw is None else draw.choice(PIECES))
            self.chunks.append(Chunk(slot, start, self.prompt[start:end], 0, self.table))
            start = end

        self.chunks[-1].num_logits = 1

    def take(self, logits: Tensor) -> None:
        self.logits.append(logits)
        self.answers.append(int(logits.argmax()))

    def next_decode(self) -> Chunk:
        chunk = Chunk(self.slot, self.position, [self.answers[-1]], table=self.table)
        self.position += 1
        return chunk

    @property
    def is_done(self) -> bool:
        return len(self.answers) == self.num_answers


def release(runner: Runner, slot: int) -> None:
    if runner.slots is not None:
        runner.slots.release(slot)


def play_alone(runner: Runner, player: Player, slot: int = 0) -> Player:
    """Run one step for each chunk and each token, with an otherwise empty batch."""
    player.sit(slot)
    for chunk in player.chunks:
        logits = forward(runner, Plan([], [chunk]))

    player.take(logits[0])
    while not player.is_done:
        player.take(forward(runner, Plan([player.next_decode()], []))[0])

    release(runner, slot)
    return player


def play_together(
    runner: Runner,
    players: list[Player],
    num_slots: int,
    seed: int,
    *,
    start_together: bool = False,
) -> int:
    """Draw arrivals, slots and the prompts that go on at random. Return the largest number of
    decodes in one step.

    With `start_together` no player decodes before all prompts are in, so that the first decodes
    fill every slot.
    """
    draw = random.Random(seed)
    waiting = list(players)
    seated = dict[int, Player]()
    free = list(range(num_slots))
    most = 0
    while waiting or seated:
        for _ in range(num_slots if start_together else draw.choice([0, 1, 4, num_slots])):
            if waiting and free:
                slot = free.pop(
                    draw.randrange(len(free)) if draw.random() < 0.3 else free.index(min(free))
                )
                seated[slot] = waiting.pop(0)
                seated[slot].sit(slot, draw if runner.slots is None else None)

        decodes = [seated[slot] for slot in sorted(seated) if not seated[slot].chunks]
        if start_together and len(decodes) < len(seated):
            decodes = []

        prefills: list[tuple[Player, Chunk]] = []
        for player in (seated[slot] for slot in sorted(seated) if seated[slot].chunks):
            if draw.random() < 0.7 and len(prefills) < 6:
                prefills.append((player, player.chunks.pop(0)))

        if not decodes and not prefills:
            continue

        most = max(most, len(decodes))
        logits = forward(
            runner,
            Plan([player.next_decode() for player in decodes], [chunk for _, chunk in prefills]),
        )
        sampled_players = decodes + [player for player, chunk in prefills if chunk.num_logits]
        for player, row_logits in zip(sampled_players, logits, strict=True):
            player.take(row_logits)
            if player.is_done:
                del seated[player.slot]
                free.append(player.slot)
                release(runner, player.slot)

    return most


def random_players(
    vocab_size: int, lengths: list[int], num_answers: int, seed: int = 0
) -> list[Player]:
    draw = torch.Generator().manual_seed(seed)
    prompts = [
        torch.randint(3, vocab_size, (length,), generator=draw).tolist() for length in lengths
    ]
    return [Player(prompt, num_answers) for prompt in prompts]
