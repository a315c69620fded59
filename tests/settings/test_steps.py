"""The steps that resolve settings: what each says that it reads and writes is what it does, and it
reads nothing that a later step still writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lmi.errors import StartError
from lmi.settings.given import Given
from lmi.settings.handler import Handler
from lmi.settings.properties import parse
from lmi.settings.start import StartInputs
from lmi.settings.step_order import (
    FIRST_STEPS,
    STEPS_OF_ONE_MODEL,
    STEPS_OF_SEVERAL_MODELS,
    further_steps,
)
from lmi.settings.steps import GIVEN, Resolution, SettingsStep, run
from lmi.settings.table import OPTIONS, find
from lmi.settings.values import Values
from lmi.shared.machine import Machine
from tests.settings.settling import CPU, FOUR_GPUS

PARTS = ("server.*", "model.*", "engine.*")
GIVEN_AT_THE_START = ("start", "values")
FIELDS = {field.name: field for field in fields(Resolution) if field.name not in GIVEN_AT_THE_START}
TEMPLATE = '{"chat_template": "{% if tools %}<tool_call>{% endif %}<think>"}'
# An engine with what others may have: another name for an option, defaults, a port.
FOX = Handler(
    load="",
    means={"option.paws": "option.max_rolling_batch_size"},
    defaults={"option.max_rolling_batch_prefill_tokens": 64, "option.max_beam_width": 2},
    port_variables=("FOX_PORT",),
)


@dataclass
class Uses:
    """What a step read, and what it wrote."""

    reads: set[str] = field(default_factory=set)
    writes: set[str] = field(default_factory=set)

    def read(self, name: str) -> None:
        """Note a name, unless the step itself wrote it before."""
        if name not in self.writes:
            self.reads.add(name)


class RecordedValues(Values):
    """Values that tell what is read of them as final, and what is chosen."""

    uses: Uses = msgspec.field(default_factory=Uses)

    def final(self, key: str) -> Any:
        self.uses.read(key)
        return super().final(key)

    def fields(self, part: str) -> dict[str, Any]:
        uses = self.uses
        uses.read(f"{part}.*")
        self.uses = Uses()
        values = super().fields(part)
        self.uses = uses
        return values

    def choose(self, key: str, value: Any, reason: str) -> None:
        self.uses.writes.add(key)
        super().choose(key, value, reason)

    def settle(self, key: str, value: Any, reason: str) -> None:
        self.uses.writes.add(key)
        super().settle(key, value, reason)

    def pick(self, givens: Iterable[Given]) -> None:
        self.uses.writes.add(GIVEN)
        super().pick(givens)

    def drop(self, key: str) -> None:
        self.uses.writes.add(GIVEN)
        super().drop(key)


class RecordedResolution(Resolution):
    """A resolution that tells which of its fields are read and written."""

    values: RecordedValues

    def __getattribute__(self, name: str) -> Any:
        if name in FIELDS:
            self.values.uses.read(name)

        return super().__getattribute__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in FIELDS and hasattr(self, "values"):
            self.values.uses.writes.add(name)

        super().__setattr__(name, value)


def uses_of(start: StartInputs) -> dict[SettingsStep, Uses]:
    """Resolve with the real steps until one of them ends the start. Returns what each step used."""
    resolution = RecordedResolution(start, RecordedValues(start))
    values = resolution.values
    uses: dict[SettingsStep, Uses] = {}

    def run_each(steps: Iterable[SettingsStep]) -> None:
        for step in steps:
            values.uses = uses[step] = Uses()
            run([step], resolution)

    try:
        run_each(FIRST_STEPS)
        run_each(further_steps(values))
    except StartError:
        return uses

    assert resolution.config is not None
    return uses


def steps_together(uses: Iterable[dict[SettingsStep, Uses]]) -> dict[SettingsStep, Uses]:
    """Return what each step read and wrote in any of the resolutions."""
    together: dict[SettingsStep, Uses] = {}
    for run_uses in uses:
        for step, step_uses in run_uses.items():
            sum_of_uses = together.setdefault(step, Uses())
            sum_of_uses.reads |= step_uses.reads
            sum_of_uses.writes |= step_uses.writes

    return together


@pytest.fixture
def starts(tmp_path: Path) -> list[StartInputs]:
    """Starts of which each makes some steps do what they do seldom."""
    model = tmp_path / "model"
    (model / "adapters" / "pirate").mkdir(parents=True)
    (model / "config.json").write_text('{"auto_map": {}}')
    (model / "tokenizer_config.json").write_text(TEMPLATE)
    (model / "adapters" / "pirate" / "adapter_config.json").write_text("{}")
    (model / "adapters" / "pirate" / "adapter_model.safetensors").write_text("")

    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.json").write_text("{}")

    code = tmp_path / "code"
    code.mkdir()
    (code / "model.py").write_text("def handle(inputs): ...\n")
    (code / "requirements.txt").write_text("")

    secured = {
        "SAGEMAKER_SECURE_MODE": "true",
        "SAGEMAKER_SECURITY_CONTROLS": "DISALLOW_PICKLE_FILES",
    }

    on_sagemaker = {"SAGEMAKER_REGION": "x", "SERVING_MAX_QUEUE_WAIT": "99"}
    small = Machine(num_cores=2, is_container=True, memory_bytes=1 << 30)

    def start(folder: Path | None, text: str = "", **circumstances: Any) -> StartInputs:
        circumstances = {"machine": CPU, "cwd": tmp_path, **circumstances}
        return StartInputs(folder=folder, properties=parse(text), **circumstances)

    return [
        start(None),
        start(model, "option.enable_lora=true"),
        start(model, environ=secured),
        start(model, "option.model_id=owner/name"),
        start(code),
        start(code, "option.model_id=owner/name", fetched={"owner/name": model}),
        start(
            model,
            "option.rolling_batch=fox\noption.paws=3\noption.tensor_parallel_degree=max\n"
            "safe_port_range=9000-9009\nwith_gateway=true",
            machine=FOUR_GPUS,
            handlers={"fox": FOX},
        ),
        start(None, "multi_model=true\nsafe_port_range=9000-9009\nwith_gateway=true"),
        start(None, "multi_model=true", environ=secured),
        start(None, "multi_model=true\nmax_request_size=9999999999", machine=small),
        start(None, "multi_model=true", environ=on_sagemaker),
        start(model, "option.tool_call_parser=unheard\noption.reasoning_parser=of"),
        start(model, environ=on_sagemaker),
        start(
            plain,
            "max_request_size=9999999999\noption.served_model_name=a,b\n"
            "option.max_rolling_batch_size=3",
            machine=small,
        ),
    ]


def declared_reads(uses: Uses, chosen: set[str]) -> set[str]:
    """Return what a row has to declare: not what no step chooses, which is known before them all,
    and no single options of a part that is read whole.
    """
    reads = set[str]()
    for name in uses.reads:
        is_single = name not in PARTS and name not in FIELDS
        if not is_single or (name in chosen and part_of(name) not in uses.reads):
            reads.add(name)

    return reads


def name_of(step: SettingsStep) -> str:
    return f"{step.run.__module__}.{step.run.__name__}"


def part_of(key: str) -> str:
    """Return the name that stands for all options of its part: "server.*"."""
    option = find(key)
    assert option is not None, key
    return f"{option.part}.*"


@pytest.mark.parametrize(
    "further", [STEPS_OF_ONE_MODEL, STEPS_OF_SEVERAL_MODELS], ids=["one model", "several models"]
)
def test_each_step_reads_and_writes_what_its_row_says(
    starts: list[StartInputs], further: tuple[SettingsStep, ...]
) -> None:
    steps = (*FIRST_STEPS, *further)
    chosen = {name for step in steps for name in step.writes}
    recorded = [uses for uses in map(uses_of, starts) if further[0] in uses]
    together = steps_together(recorded)
    assert together.keys() == set(steps)
    for step in steps:
        uses = together[step]
        assert (name_of(step), declared_reads(uses, chosen)) == (name_of(step), set(step.reads))
        assert (name_of(step), uses.writes) == (name_of(step), set(step.writes))


@pytest.mark.parametrize(
    "further", [STEPS_OF_ONE_MODEL, STEPS_OF_SEVERAL_MODELS], ids=["one model", "several models"]
)
def test_a_step_comes_after_every_other_one_that_writes_what_it_reads(
    further: tuple[SettingsStep, ...],
) -> None:
    assert list(faults_of_order((*FIRST_STEPS, *further))) == []


def test_a_step_in_the_wrong_place_is_found() -> None:
    steps = list((*FIRST_STEPS, *STEPS_OF_ONE_MODEL))
    moved = [step for step in steps if name_of(step).endswith("engine_choice.choose_engine")]
    steps.remove(moved[0])
    assert "engine_choice.settle_engine reads chosen_engine" in ", ".join(faults_of_order(steps))

    steps.append(moved[0])
    assert "engine_choice.settle_engine reads chosen_engine" in ", ".join(faults_of_order(steps))


def faults_of_order(steps: Iterable[SettingsStep]) -> Iterator[str]:
    """Yield each name that a step reads before it is final."""
    steps = tuple(steps)
    for position, step in enumerate(steps):
        earlier = {name for before in steps[:position] for name in before.writes}
        later = {name for after in steps[position + 1 :] for name in after.writes}
        for name in step.reads:
            is_known = name in earlier or name in PARTS or find(name) is not None
            if name in FIELDS:
                is_known = is_known or FIELDS[name].default is not MISSING

            written_later = {key for key in later if key == name or name == _part(key)}
            if not is_known or written_later:
                yield f"{name_of(step)} reads {name}, which is written later"


def _part(name: str) -> str:
    return part_of(name) if find(name) is not None else ""


def test_a_name_in_a_row_is_a_field_or_an_option_and_never_both() -> None:
    keys = {option.key for option in OPTIONS}
    assert keys & FIELDS.keys() == set()

    for step in (*FIRST_STEPS, *STEPS_OF_ONE_MODEL, *STEPS_OF_SEVERAL_MODELS):
        assert {*step.reads, *step.writes} <= {*keys, *FIELDS, *PARTS, GIVEN}


def test_a_field_that_no_step_has_written_cannot_be_read() -> None:
    start = StartInputs(machine=CPU)
    with pytest.raises(AttributeError):
        Resolution(start, Values(start)).code  # noqa: B018
