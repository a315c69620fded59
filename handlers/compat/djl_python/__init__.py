"""The names that code written for djl-serving imports, without djl-serving.

On the path of the process that runs such code and of no other (`handlers/python_model.py` puts it there). Modules and
names are where the reference's public documentation imports them from; the code is ours.
"""

from djl_python.inputs import Input
from djl_python.outputs import Output
from djl_python.stubs import install

install(__name__)

from djl_python.session_manager import SessionManager  # noqa: E402

__all__ = ["Input", "Output", "SessionManager"]
