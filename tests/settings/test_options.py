"""The table of options: its names are unique, and what its rows say fits together."""

from __future__ import annotations

import pytest

from lmi.settings.option import Option
from lmi.settings.secure_mode import CONTROLS
from lmi.settings.shown import text_in_file
from lmi.settings.table import OPTIONS


def test_every_key_and_every_flag_means_one_option() -> None:
    keys = [key for option in OPTIONS for key in (option.key, *option.aliases)]
    flags = [flag for option in OPTIONS for flag in option.flags]

    assert len(set(keys)) == len(keys)
    assert len(set(flags)) == len(flags)


def test_a_field_has_the_name_that_its_option_says() -> None:
    by_key = {option.key: option for option in OPTIONS}
    assert (by_key["port"].field, by_key["port"].part) == ("server.port", "server")
    assert by_key["option.rolling_batch"].field == "engine.handler"
    assert (by_key["option.handler"].field, by_key["option.handler"].part) == ("", "engine")


@pytest.mark.parametrize("option", OPTIONS, ids=[option.key for option in OPTIONS])
def test_what_an_option_says_of_itself_fits_together(option: Option) -> None:
    assert option.help
    assert option.refused_by in ("", *CONTROLS)
    assert option.own_kinds.keys() <= {*option.env, *option.platform}
    if text := text_in_file(option.key, option.default):
        assert option.kind.parse(text) == option.default
