"""The last step of each kind of start: what the others have settled becomes a frozen Config."""

from dataclasses import replace

from lmi.settings.config import Config, EngineConfig, ModelConfig, ServerConfig
from lmi.settings.engine_rules import BATCH
from lmi.settings.model_names import sources_of
from lmi.settings.steps import Resolution
from lmi.settings.table import is_of_server
from lmi.settings.values import Values
from lmi.user_code.options import FORMATTER_WORDS, UserCodeConfig


def freeze_one_model(resolution: Resolution) -> None:
    """Put all that was settled together, frozen."""
    values = resolution.values
    model = values.fields("model")
    if model.get("output_formatter") not in FORMATTER_WORDS:
        model.pop("output_formatter", None)

    engine = resolution.chosen_engine
    resolution.config = Config(
        server=_server(resolution),
        model=ModelConfig(
            path=str(resolution.path.resolve()),
            sources=sources_of(resolution),
            adapters=resolution.adapters,
            dynamic_batch=engine.has_dynamic_batch,
            tells_tools=resolution.tells_tools,
            sampling_defaults=engine.handler.sampling_defaults,
            generation_defaults=resolution.generation_defaults,
            **model,
        ),
        engine=EngineConfig(
            num_engines=resolution.num_engines,
            ports=resolution.ports,
            device_ids=resolution.device_ids,
            options=resolution.engine_options,
            option_sources=_sources_of_options(values),
            is_batch_default=BATCH not in values and "batch_size" not in values,
            **values.fields("engine"),
        ),
        user_code=_code(resolution),
        requirements=resolution.requirements,
    )


def freeze_several_models(resolution: Resolution) -> None:
    """Put together, frozen, what was settled of a server that starts without a model."""
    flags = resolution.start.flags
    of_models = {key: text for key, text in flags.items() if not is_of_server(key)}
    resolution.config = Config(
        server=replace(_server(resolution), model_flags=of_models),
        model=ModelConfig(path="", name="model"),
        engine=EngineConfig(),
    )


def _code(resolution: Resolution) -> UserCodeConfig | None:
    """Return the settings of user code, with what its functions get."""
    if resolution.code is None:
        return None

    return replace(resolution.code, properties=resolution.code_properties)


def _server(resolution: Resolution) -> ServerConfig:
    values = resolution.values
    fields = {**values.fields("server"), "gateway_port": resolution.gateway_port}
    return ServerConfig(**fields, keeps_queue_short="max_queue_wait" not in values)


def _sources_of_options(values: Values) -> dict[str, str]:
    """Return where each option of a model or an engine was given, by name without `option.`."""
    sources: dict[str, str] = {}
    for key, winner in values.picked.items():
        if key.startswith("option."):
            sources[winner.given.key.removeprefix("option.")] = winner.given.source

    return sources
