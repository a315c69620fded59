"""The names that code written for djl-serving imports, without djl-serving.

Only the process of user code has this package on its path (`lmi/user_code/runner.py` puts it
there). Modules and names are those of the reference's public documentation. The code is ours.
"""

from djl_python.inputs import Input
from djl_python.outputs import Output
from djl_python.session_manager import SessionManager
from djl_python.stubs import install

install(__name__)

__all__ = ["Input", "Output", "SessionManager"]
