"""A clock that a test sets: time.time() of this process is off by the seconds in the file
LMI_TEST_CLOCK.
"""

import os
import time
from pathlib import Path

_now = time.time
_offset = Path(os.environ["LMI_TEST_CLOCK"])
time.time = lambda: _now() + float(_offset.read_text())
