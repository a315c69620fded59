"""The operations of `/openapi.json`: what a path takes, answers, and how it fails."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import Struct, field

from lmi import errors
from lmi.apis.base.errors import ErrorRules
from lmi.description.schemas import STRING, Content, Form, Schema, content
from lmi.settings.config import ModelConfig

Operation = dict[str, Any]
Causes = Iterable[type[errors.LmiError]]

# What a status may mean besides the errors of its route.
REASONS_OF_HTTP = {
    404: "There is no such path.",
    405: "The path has other methods.",
    408: "The request did not come in time.",
    413: "The body is over `max_request_size`.",
    415: "The body is compressed, or a form in parts.",
    431: "The head of the request is too large.",
    500: "A fault of the server.",
}
CAUSES_OF_INFERENCE: Causes = (
    errors.InvalidRequest,
    errors.Unauthorized,
    errors.ForeignPage,
    errors.UnknownAdapter,
    errors.UnknownModel,
    errors.Overloaded,
    errors.GenerationFailed,
    errors.EngineLost,
    errors.DeadlineExceeded,
    errors.OutOfMemory,
)


class ApiDescription(Struct, frozen=True, kw_only=True):
    """The part of the document that describes one API. Each operation is added to it."""

    name: str
    # What the API is, for people.
    about: str
    # The model whose names the paths have.
    model: ModelConfig
    # The components of the document that its operations name.
    schemas: dict[str, Schema]
    # The content of a failure.
    error: Content = field(default_factory=lambda: content("Error"))
    # Which status an error has. Without rules it is that of its class.
    rules: Sequence[ErrorRules] = ()
    paths: dict[str, dict[str, Operation]] = field(default_factory=dict)

    def add(
        self,
        method: str,
        path: str,
        summary: str,
        answer: Form,
        causes: Causes = (),
        *,
        body: Form = None,
        parameters: Iterable[Schema] = (),
    ) -> Operation:
        """Describe an operation, whose failures have these causes and those of every route. Without
        an `answer` it always fails.
        """
        all_causes: list[type[errors.LmiError]] = [errors.Unavailable, *causes]
        if "{model}" in path:
            all_causes.append(errors.UnknownModel)

        responses: dict[str, Schema] = {}
        if answer:
            responses["200"] = {"description": "the answer", "content": _content(answer)}

        responses |= self._failures(all_causes)
        described: Operation = {"tags": [self.name], "summary": summary, "responses": responses}
        if body:
            described["requestBody"] = {"required": True, "content": _content(body)}

        all_parameters = [*_parameters_of_path(self.model, path), *parameters]
        if all_parameters:
            described["parameters"] = all_parameters

        self.paths.setdefault(path, {})[method] = described
        return described

    def add_inference(
        self, path: str, summary: str, answer: Form, body: Form, parameters: Iterable[Schema] = ()
    ) -> Operation:
        """Describe an operation that the engine answers."""
        return self.add(
            "post", path, summary, answer, CAUSES_OF_INFERENCE, body=body, parameters=parameters
        )

    def _failures(self, causes: Causes) -> dict[str, Schema]:
        """Describe each status that HTTP or a cause gives. The reason is the first paragraph of
        the cause's docstring.
        """
        reasons = {status: [reason] for status, reason in REASONS_OF_HTTP.items()}
        for cause in dict.fromkeys(causes):
            paragraph = (cause.__doc__ or "").partition("\n\n")[0]
            reason = " ".join(paragraph.split())
            statuses = {rules.status_of(cause) for rules in self.rules} or {cause.status}
            for status in statuses:
                reasons.setdefault(status, []).append(reason)

        failures: dict[str, Schema] = {}
        for status in sorted(reasons):
            description = " ".join(reasons[status])
            failures[str(status)] = {"description": description, "content": self.error}

        return failures


def _content(form: Form) -> Content:
    """Return the content of a body: as it is given, or JSON of this form."""
    return form if isinstance(form, dict) else content(form)


def _parameters_of_path(model: ModelConfig, path: str) -> list[Schema]:
    """Return the parameters of a path, with all values that are served here if the server has only
    one model.
    """
    served: dict[str, list[str]] = {}
    if model.path:
        served = {"model": list(model.names), "version": [model.version]}

    parameters: list[Schema] = []
    for name in re.findall(r"{(\w+)}", path):
        schema = STRING
        if name in served:
            schema = {**STRING, "enum": served[name]}

        parameters.append({"name": name, "in": "path", "required": True, "schema": schema})

    return parameters


def about_defaults(model: ModelConfig) -> str:
    """Return a sentence about the model's defaults, for an API that applies them, or "" where it
    has none.
    """
    defaults = model.generation_defaults
    if not defaults.values:
        return ""

    return f" What a request leaves out is, for this model: {defaults}."
