"""Which tokens keep an answer valid UTF-8: xgrammar lets some sequences of bytes pass that no character has.

These are surrogates, long forms of short characters, and numbers over U+10FFFF. A token that holds such a sequence is
never allowed. Where a token ends with a first byte in `SECOND`, the next one must begin with a second byte of it.
Source: RFC 3629, section 4.
"""

from __future__ import annotations

import re

SECOND = {0xE0: range(0xA0, 0xC0), 0xED: range(0x80, 0xA0), 0xF0: range(0x90, 0xC0), 0xF4: range(0x80, 0x90)}
_WHOLE = rb"""[\x00-\x7f] | [\xc2-\xdf][\x80-\xbf] | \xe0[\xa0-\xbf][\x80-\xbf] | \xed[\x80-\x9f][\x80-\xbf]
    | [\xe1-\xec\xee\xef][\x80-\xbf]{2} | \xf0[\x90-\xbf][\x80-\xbf]{2} | [\xf1-\xf3][\x80-\xbf]{3}
    | \xf4[\x80-\x8f][\x80-\xbf]{2}"""
_BEGUN = rb"""[\xc2-\xf4] | \xe0[\xa0-\xbf] | \xed[\x80-\x9f] | [\xe1-\xec\xee\xef][\x80-\xbf]
    | \xf0[\x90-\xbf][\x80-\xbf]? | [\xf1-\xf3][\x80-\xbf]{1,2} | \xf4[\x80-\x8f][\x80-\xbf]?"""
_PART = re.compile(rb"[\x80-\xbf]{0,3} (?:%s)* (?:%s)?" % (_WHOLE, _BEGUN), re.VERBOSE)


def is_part_of_text(written: bytes) -> bool:
    """Whether bytes may stand somewhere in a valid text."""
    return _PART.fullmatch(written) is not None


def is_middle(written: bytes) -> bool:
    """Whether bytes begin in the middle of a character."""
    return bool(written) and 0x80 <= written[0] < 0xC0
