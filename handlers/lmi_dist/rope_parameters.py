"""The parameters of rotary embeddings in config.json."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from handlers.lmi_dist.config_rules import ROPE_TABLE, ROPE_TYPES, check_known, checked_values
from lmi.errors import ModelUnusable

# What the parameters of a type must have.
_ROPE_NEEDS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}


class RopeReader(Struct, frozen=True):
    """Reads the parameters of one file. `values` are all values that it has, with defaults."""

    file: Path
    class_name: str
    values: Mapping[str, Any]

    def read(self) -> dict[str, Any]:
        """The parameters in one object, or in one for each type of layer. Raises ModelUnusable."""
        scaling = self.values.get("rope_scaling")
        theta = self.values["rope_theta"]
        parameters = checked_values(self.file, self.values.get("rope_parameters", {}))
        thetas = dict.fromkeys(self.values.get("layer_types", ()), theta)
        if self.class_name == "Gemma3ForCausalLM":
            thetas = {
                "full_attention": theta,
                "sliding_attention": self.values["rope_local_base_freq"],
            }
            parameters = {kind: parameters.get(kind) or {"rope_type": "default"} for kind in thetas}
            parameters["full_attention"] = parameters["full_attention"] | (scaling or {})
        elif scaling:
            parameters = checked_values(self.file, scaling)

        by_type: dict[str, Any] = {}
        for kind, theta_of_kind in thetas.items():
            if kind in parameters:
                by_type[kind] = self._standard(parameters[kind], theta_of_kind)

        return by_type or self._standard(parameters, theta)

    def _standard(self, parameters: Mapping[str, Any], theta: float) -> dict[str, Any]:
        """The parameters of one type of rotary embeddings, by today's names."""
        checked = checked_values(self.file, parameters)
        rope_type = checked.get("rope_type", checked.get("type", "default"))
        if self.class_name == "Phi3ForCausalLM" and rope_type in ("su", "yarn"):
            # These are its older names of longrope.
            rope_type = "longrope"

        check_known(self.file, "rope_type", rope_type, ROPE_TYPES, ROPE_TABLE)
        self._check_needs(rope_type, checked)

        standard: dict[str, Any] = {"rope_theta": theta}
        if "partial_rotary_factor" in self.values:
            standard["partial_rotary_factor"] = self.values["partial_rotary_factor"]

        return standard | checked | {"rope_type": rope_type}

    def _check_needs(self, rope_type: str, parameters: Mapping[str, Any]) -> None:
        for needed in _ROPE_NEEDS.get(rope_type, ()):
            if needed not in parameters:
                raise ModelUnusable(
                    f"{self.file}: rope_parameters of type {rope_type} have no {needed}"
                )

        if rope_type == "llama3":
            if parameters["high_freq_factor"] <= parameters["low_freq_factor"]:
                raise ModelUnusable(f"{self.file}: high_freq_factor must be over low_freq_factor")
