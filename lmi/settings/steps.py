"""How settings are resolved: in steps, which write into one Resolution.

`step_order.py` has the steps in their order. Each is a function in the file of its subject. It
takes a `Resolution`, reads what earlier steps have written there, and writes what it chooses.

A step declares what it reads and writes. Options that no step chooses are not among that, since
what was given is known before all steps. A test compares the declarations with what the steps do,
and their order with the declarations.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from msgspec import Struct

from lmi.settings.config import Config, GenerationDefaults
from lmi.settings.given import Given
from lmi.settings.handler import ChosenEngine
from lmi.settings.start import Fetched, StartInputs
from lmi.settings.values import Values
from lmi.user_code.options import RequirementsConfig, UserCodeConfig


@dataclass(slots=True, repr=False)
class Resolution:
    """The settings of one start while they are resolved.

    A field without a default has no value until its step has written it. To read it before is an
    AttributeError.
    """

    start: StartInputs
    # The values of the options, and what the operator should know.
    values: Values

    # Every value that was given, with the meanings of other names, in no order.
    givens: list[Given] = field(init=False)
    # The folder of each source that was fetched, or that was opened to before, by its text.
    fetched: Fetched = field(init=False)
    # The remote sources that are not fetched yet.
    missing: tuple[str, ...] = field(init=False)

    # The functions of the model's own code that are used. None: nothing of it runs.
    code: UserCodeConfig | None = field(init=False)
    # What its functions get at their first call.
    code_properties: dict[str, str] = field(init=False)
    # What is installed for that code.
    requirements: RequirementsConfig | None = field(init=False)

    chosen_engine: ChosenEngine = field(init=False)
    # The GPUs that may be used, () on a CPU.
    gpus: tuple[str, ...] = field(init=False)
    num_engines: int = field(init=False)
    # The GPUs of all replicas in turn.
    device_ids: tuple[str, ...] = field(init=False)
    # The TCP ports of all replicas in turn. Several models have ports of their own each.
    ports: tuple[int, ...] = ()
    # Those of engines that somebody named, of the range.
    given_ports: tuple[int, ...] = ()
    # Every other option for the engine, by name without `option.`.
    engine_options: dict[str, str] = field(init=False)

    # The model's folder as the options name it, or the source that is missing.
    path: Path = field(init=False)
    # Whether the server tells the model of tools, since the chat template does not.
    tells_tools: bool = field(init=False)
    generation_defaults: GenerationDefaults = field(init=False)
    # The folders of the LoRA adapters beside the model, by name.
    adapters: dict[str, str] = field(init=False)
    gateway_port: int | None = field(init=False)

    # All of these settings, frozen.
    config: Config = field(init=False)

    @property
    def is_user_code(self) -> bool:
        """Whether user code is the model. It then runs in place of the engines."""
        return self.code is not None and self.code.handler is not None

    @property
    def is_model_here(self) -> bool:
        """Whether the model's files are here, and not at a source that is still to be fetched."""
        return str(self.path) not in self.missing


class SettingsStep(Struct, frozen=True):
    """One step. `reads` and `writes` name fields of `Resolution` and keys of options.

    `GIVEN` stands for the given values themselves, and "server.*" for every option of the server,
    as do "model.*" and "engine.*" for theirs.
    """

    run: Callable[[Resolution], None]
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    # Whether the start ends after it if there was any fault so far.
    reports_faults: bool = False


GIVEN = "given values"


def run(steps: Iterable[SettingsStep], resolution: Resolution) -> None:
    """Run steps in turn. Raises BadConfiguration with a line for each fault, or what a step
    raises.
    """
    for step in steps:
        step.run(resolution)
        if step.reports_faults:
            resolution.values.stop_at_faults()
