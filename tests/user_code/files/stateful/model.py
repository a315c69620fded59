"""A handler with sessions, as the reference's pages describe one: it keeps an array and a value in
each.

This file does not import lmi. `action` in the body chooses what the handler does.
"""

import json
import os

from djl_python import Input, Output, SessionManager

SESSION = "X-Amzn-SageMaker-Session-Id"


class Service:
    def __init__(self):
        self.sessions = None

    def initialize(self, properties):
        self.sessions = SessionManager(properties)

    def inference(self, inputs):
        body = inputs.get_as_json()
        if "requestType" in body:
            return Output().add_as_json({"given": body, "session": inputs.get_property(SESSION)})

        return getattr(self, body["action"])(inputs)

    def create(self, inputs):
        session = self.sessions.create_session()
        session.get_as_numpy("state", shape=(3, 2), create=True).fill(1)
        session.put("owner", {"pid": os.getpid()})
        output = Output().add_property(SESSION, session.session_id)
        return output.add_as_json({"result": "session created", "path": session.files_path})

    def regular(self, inputs):
        session = self.sessions.get_session(inputs.get_property(SESSION))
        if session is None:
            return Output().error("session not found")

        state = session.get_as_numpy("state", shape=(3, 2))
        state += 1
        return Output().add_as_json(
            {"state": state.tolist(), "owner": session.get("owner"), "pid": os.getpid()}
        )

    def streaming(self, inputs):
        session = self.sessions.get_session(inputs.get_property(SESSION))
        rows = session.get_as_numpy("state", shape=(3, 2)).tolist()
        output = Output().add_property("Content-Type", "application/jsonlines")
        return output.add_stream_content((json.dumps(row) + "\n" for row in rows), None)

    def close(self, inputs):
        self.sessions.close_session(inputs.get_property(SESSION))
        return (
            Output()
            .add_property("X-Amzn-SageMaker-Session-Closed", "true")
            .add_as_json({"result": "session closed"})
        )

    def header(self, inputs):
        body = inputs.get_as_json()
        output = Output()
        for name, value in body["headers"].items():
            output.add_property(name, value)

        if body.get("stream"):
            output.add_property("Content-Type", "text/plain")
            return output.add_stream_content(iter(["unfinished"]), None)

        return output.add_as_json({"result": "long"})


_service = Service()


def handle(inputs: Input):
    if _service.sessions is None:
        _service.initialize(inputs.get_properties())

    return None if inputs.is_empty() else _service.inference(inputs)
