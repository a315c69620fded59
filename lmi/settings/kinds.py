"""Kinds of values: each parses the text of an option and says which values are allowed.

Forms of tool calls and of reasoning have the names of vLLM's parsers, `load_models` the form of djl-serving's -m.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any
from urllib.parse import unquote, urlsplit

from msgspec import Struct

LARGEST = 2**31 - 1
SIZE_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
LENGTH_UNITS = {"": 1, "k": 10**3, "m": 10**6, "K": 1 << 10, "M": 1 << 20}
GATEWAY_PORT = 8081
MOST_S = 1e7  # also of milliseconds
WORDS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


class TooLarge(ValueError):
    """A value is over a bound that `Kind.allowed` does not name. The text says what is allowed."""


class Kind(Struct, frozen=True):
    """One kind of value. `parse` turns a text into a value and raises ValueError for a text that is not allowed."""

    allowed: str
    parse: Callable[[str], Any]
    unset: str = ""  # the text that means None
    words: tuple[str, ...] = ()  # the values, where they are few
    unit: str = "VALUE"  # what the help shows in the place of a value


class NamedModel(Struct, frozen=True):
    """One model of `load_models`. `name` and `engine` may be empty; version and device have no meaning here."""

    url: str
    name: str = ""
    engine: str = ""

    def __str__(self) -> str:
        return f"{self.name}::{self.engine}={self.url}" if self.name or self.engine else self.url


def is_true(text: str, otherwise: bool = False) -> bool:
    """Return what a word for true or false means, or `otherwise` for any other text."""
    return WORDS.get(text.strip().lower(), otherwise)


def local_path(url: str) -> str:
    """Return the path of a `file:` URL, or any other text unchanged."""
    return unquote(urlsplit(url).path) if url.startswith("file:") else url


def integer(low: int, high: int = LARGEST) -> Kind:
    def parse(text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]{1,100}", text) or int(text) < low:
            raise ValueError
        if int(text) > high:
            raise TooLarge(f"a whole number {low}..{high}") if high == LARGEST else ValueError
        return int(text)

    bounds = f"of at least {low}" if high == LARGEST else f"{low}..{high}"
    return Kind(f"a whole number {bounds}", parse, unit="N")


def choice(*words: str, **long_names: str) -> Kind:
    """Return the kind of one of `words`, in any case. `long_names` maps further names to the words."""
    known = {word.lower(): word for word in words} | long_names

    def parse(text: str) -> str:
        if text.lower() not in known:
            raise ValueError
        return known[text.lower()]

    return Kind(", ".join(words), parse, words=words)


def form(*words: str, **other_names: str) -> Kind:
    """Return the kind of one of `words`, in any case, or of any other name, which is a form that is not read here.

    `other_names` maps further names to the words.
    """
    known = {word: word for word in words} | other_names

    def parse(text: str) -> str:
        return known.get(text.lower()) or str(FORM_NAME.parse(text))

    return Kind(f"{', '.join(words)}, or another name, which means plain text", parse, words=words)


def matching(allowed: str, pattern: str) -> Kind:
    def parse(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError
        return text

    return Kind(allowed, parse)


def several(allowed: str, each: Kind) -> Kind:
    """Return the kind of values of one kind with `;` or `,` between."""
    return Kind(allowed, lambda text: tuple(each.parse(part.strip()) for part in re.split("[;,]", text)))


def _boolean(text: str) -> bool:
    if text.lower() not in WORDS:
        raise ValueError
    return WORDS[text.lower()]


def _seconds(text: str) -> float:
    value = float(text)
    if not (0 < value and math.isfinite(value)):
        raise ValueError
    if value > MOST_S:
        raise TooLarge(f"at most {MOST_S:.0f}")
    return value


def _size(text: str) -> int:
    match = re.fullmatch(r"([0-9]{1,100})\s*([kmg]?)(?:i?b)?", text.lower())
    if match is None or not int(match[1]):
        raise ValueError
    if (size := int(match[1]) * SIZE_UNITS[match[2]]) >= 2**50:
        raise TooLarge("less than 2**50 bytes")
    return size


def _gateway_port(text: str) -> int | None:
    if text.lower() in WORDS and text not in ("0", "1"):
        return GATEWAY_PORT if WORDS[text.lower()] else None
    return int(integer(1, 65535).parse(text))


def digest(key: str) -> str:
    """Return what is kept of an API key: nobody can make the key of it."""
    return hashlib.sha256(key.encode()).hexdigest()


def _keys(text: str) -> tuple[str, ...]:
    keys = [key.strip() for key in text.split(",")]
    if not all(re.fullmatch(r"[\x21-\x7e]{1,256}", key) for key in keys):
        raise ValueError
    return tuple(dict.fromkeys(map(digest, keys)))


def _length(text: str) -> int | None:
    """Parse a length like vLLM: k and m are decimal, K and M binary. None means as long as the engine can."""
    if text.lower() in ("auto", "-1"):
        return None
    match = re.fullmatch(r"([0-9]{1,100}(?:\.[0-9]{1,6}(?=[km]))?)([kmKM]?)", text)
    length = round(float(match[1]) * LENGTH_UNITS[match[2]]) if match else 0
    if length < 1:
        raise ValueError
    if length > LARGEST:
        raise TooLarge(f"at most {LARGEST} tokens, or auto")
    return length


def _devices(text: str) -> tuple[str, ...] | None:
    if text.strip() == "*":
        return None
    names = tuple(name.strip() for name in re.split("[;,]", text))
    if not all(re.fullmatch(r"[0-9]{1,4}", name) for name in names) or len(set(names)) < len(names):
        raise ValueError
    return names


def _outputs(text: str) -> tuple[str, ...]:
    """Parse the names of tensors. Each is given once, with `:context` at its end or without."""
    outputs = tuple(OUTPUT.parse(output.strip()) for output in re.split("[;,]", text))
    if len({output.partition(":")[0] for output in outputs}) < len(outputs):
        raise ValueError
    return outputs


def _models(text: str) -> tuple[NamedModel, ...]:
    """Parse models with commas or blanks between, each [NAME]:VERSION:ENGINE:DEVICE=URL, of which the URL is needed."""
    return () if text.upper() in ("ALL", "NONE") else tuple(map(_model, re.split(r"[,\s]+", text.strip())))


def _model(text: str) -> NamedModel:
    head, equals, url = text.partition("=")
    if not equals or "/" in head:  # a URL or a path without a name
        head, url = "", text
    if not url:
        raise ValueError
    head = head[1:-1] if head.startswith("[") and head.endswith("]") else head
    name, _version, engine, *_device = [*head.split(":"), "", ""]
    return NamedModel(url, NAME.parse(name) if name else "", engine)


def _variables(text: str) -> dict[str, str]:
    """Parse NAME=VALUE pairs. A comma ends a value only if a name and `=` follow, so a value may hold commas."""
    variables = {}
    for pair in re.split(r"[;,](?=\s*[A-Za-z_]\w*=)", text):
        name, equals, value = pair.strip().partition("=")
        if not re.fullmatch(r"[A-Za-z_]\w*", name) or not equals or "\0" in value:
            raise ValueError
        variables[name] = value
    return variables


def _address(text: str) -> tuple[str, int]:
    parts = urlsplit(text)
    if parts.scheme != "http" or not parts.hostname or not parts.port or parts.path not in ("", "/"):
        raise ValueError
    return parts.hostname, parts.port


def _collector(text: str, *, is_base: bool = False) -> str:
    """Parse the URL of a collector. With `is_base` traces go to a path below it."""
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError
    return text.rstrip("/") + "/v1/traces" if is_base or parts.path in ("", "/") else text


def _port_range(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([0-9]{1,5})-([0-9]{1,5})", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]) <= 65535:
        raise ValueError
    return int(match[1]), int(match[2])


TEXT = Kind("any text in UTF-8", str)
ABSOLUTE_PATH = matching("an absolute path", r"/[^\0]*")
FOLDERS = several("absolute paths with ; between", ABSOLUTE_PATH)
GATEWAY = Kind(f"a port 1..65535, true (port {GATEWAY_PORT}) or false", _gateway_port, unit="[PORT]")
BOOLEAN = Kind("true or false", _boolean)
SECONDS = Kind("seconds, more than 0", _seconds, unit="SECONDS")
MILLISECONDS = Kind("milliseconds, more than 0", _seconds, unit="MS")
SECONDS_OR_NONE = Kind(
    "seconds, more than 0, or none",
    lambda text: None if text.lower() in ("none", "0", "-1") else _seconds(text),
    unset="none",
    unit="SECONDS",
)
SIZE = Kind("bytes, more than 0, as in 67108864, 64k, 64m or 1g", _size, unit="BYTES")
MEGABYTES = Kind(
    "a whole number of megabytes; 0: 1 GiB",
    lambda text: integer(0, 1 << 20).parse(text) * SIZE_UNITS["m"] or SIZE_UNITS["g"],
)
KEYS = Kind("keys of printable ASCII without blanks, with , between", _keys)
ORIGIN = matching("an origin", r"\*|[a-z][a-z0-9+.-]*://[A-Za-z0-9.:\[\]-]+")
ORIGINS = Kind(
    "SCHEME://HOST[:PORT], several with , between, or *",
    lambda text: tuple(ORIGIN.parse(each) for each in re.findall(r"[^\s,\"\[\]]+", text)),
)
HOST_NAME = matching("a host name", r"\*|[A-Za-z0-9._-]{1,253}")
HOSTS = Kind(
    "host names with , between, or *",
    lambda text: tuple(HOST_NAME.parse(each).lower() for each in re.findall(r"[^\s,\"\[\]]+", text)),
)
TEXTS = Kind(
    "texts with , between",
    lambda text: tuple(dict.fromkeys(part.strip() for part in re.split("[;,]", text) if part.strip())),
)
LENGTH = Kind(
    "a whole number of at least 1, as in 4096, 32k (32000) or 32K (32768), or auto", _length, unit="TOKENS|auto"
)
DEGREE = Kind(
    "a whole number 1..1024, or max",
    lambda text: "max" if text.lower() == "max" else integer(1, 1024).parse(text),
    unit="N|max",
)
PORT_RANGE = Kind("FIRST-LAST, two ports", _port_range, unit="FIRST-LAST")
DEVICES = Kind("* or GPU numbers with ; between", _devices, unset="*")
STREAMING = Kind(  # the reference's own streamer, or transformers'
    "true, false", lambda text: text.lower() == "huggingface" or _boolean(text), words=("true", "false")
)
ADDRESS = Kind("http://HOST:PORT", _address)
COLLECTOR = Kind("http://HOST:PORT/v1/traces, or https, for OTLP over HTTP and not gRPC", _collector, unit="URL")
COLLECTOR_BASE = Kind("http://HOST:PORT, or https, for OTLP over HTTP and not gRPC", partial(_collector, is_base=True))
NAME = matching("1 to 128 letters, digits or ._:@-, a letter or digit first", r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}")
SERVED_NAME = matching(
    "1 to 128 letters, digits or ._:@/-, a letter or digit first", r"[A-Za-z0-9][A-Za-z0-9._:@/-]{0,127}"
)
OUTPUT = matching("a name", r"[A-Za-z_][A-Za-z0-9_.]{0,127}(:context)?")
OUTPUTS = Kind(
    "names with ; between, each once and perhaps with :context, as in logits;hidden_states:context", _outputs
)
PYTHON_FILE = matching("a Python file in the model's folder", r"[^/\0]+\.py")
NAMES = several(f"names with ; between, each {NAME.allowed}", NAME)
SERVED_NAMES = Kind(
    f"names with , or blanks between, each {SERVED_NAME.allowed}",
    lambda text: tuple(map(SERVED_NAME.parse, re.findall(r"[^;,\s]+", text.strip("[]").replace('"', "")))),
)
VARIABLES = Kind("NAME=VALUE, several with , between", _variables, unit="NAME=VALUE")
MODELS = Kind("NAME=PATH, NAME:VERSION:ENGINE:DEVICE=PATH, a path, ALL or NONE", _models, unit="NAME=PATH")
FUNCTION = matching("the name of a function in the model's own model.py", r"[A-Za-z_][A-Za-z0-9_]{0,127}")
BUILT_IN = "djl_python."  # the prefix of the reference's entry points
ENTRY_POINT = matching(
    "a Python file in the model's folder, or djl_python.…", r"djl_python\.[A-Za-z0-9_.-]+|[^\0]+\.py"
)


def is_built_in(entry: str) -> bool:
    return entry.startswith(BUILT_IN)


ENGINE = Kind(
    "Python or MPI; what runs the model is option.rolling_batch (auto, vllm, trtllm, lmi-dist)",
    choice("Python", "MPI").parse,
)
HANDLERS = ("auto", "lmi-dist", "vllm", "trtllm", "scheduler", "disable")
HANDLER = Kind(f"{', '.join(HANDLERS)}, or the name of another engine", str, words=HANDLERS)
BATCH_STRATEGY = choice("SINGLE_RECORD", "MULTI_RECORD", singlerecord="SINGLE_RECORD", multirecord="MULTI_RECORD")
LOG_LEVEL = choice(
    *("DEBUG", "INFO", "WARNING", "ERROR"),
    **{"0": "DEBUG", "10": "DEBUG", "20": "INFO", "30": "WARNING", "40": "ERROR", "50": "ERROR"},
    **{"warn": "WARNING", "critical": "ERROR"},
)
FORM_NAME = matching("a name", r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
FORMATTER_WORDS = ("json", "jsonlines", "sse")
FORMATTER = Kind(
    "json, jsonlines, sse, or a function in the model's own model.py",
    lambda text: text.lower() if text.lower() in FORMATTER_WORDS else FUNCTION.parse(text),
    words=FORMATTER_WORDS,
)
# The further names are vLLM's names of the forms. Source: the parsers of vLLM 0.32.
# lmi/apis/openai/calls/parsers.py has these, but text.
TOOL_CALL_FORMS = (
    "hermes json deepseek_v3 deepseek_v31 glm45 granite granite-20b-fc jamba kimi_k2 lfm2 minimax_m2 mistral openai "
    "phi4_mini_json pythonic qwen3_xml seed_oss text"
).split()
REASONING_FORMS = ("think", "mistral", "openai", "seed_oss")
TOOL_CALL_FORM = form(
    *TOOL_CALL_FORMS,
    **dict.fromkeys(("qwen", "qwen25", "qwen2_5", "qwen3", "qwen3_json", "granite4"), "hermes"),
    **dict.fromkeys(("llama3", "llama3_json", "llama4_json"), "json"),
    **{"qwen3_coder": "qwen3_xml", "glm47": "glm45", "llama4_pythonic": "pythonic"},
)
THINKING = "deepseek_r1 deepseek_v3 glm45 glm47 holo2 kimi_k2 minimax_m2 nemotron_v3 olmo3 qwen3".split()
REASONING_FORM = form(*REASONING_FORMS, **dict.fromkeys(THINKING, "think"), openai_gptoss="openai")
DTYPE = choice(
    "auto", "fp32", "bf16", "fp16", float32="fp32", float="fp32", bfloat16="bf16", float16="fp16", half="fp16"
)
