"""OpenTelemetry traces of requests, where `option.otlp_traces_endpoint` names who collects them.

`spans.py` says what the spans of a request are, `exporter.py` sends them. Without the option nothing here is imported.
"""
