"""Requests made from the API's own document, as it allows and as it forbids: each gets an answer, or a 4xx.

The same ones every time; `st run http://…/openapi.json` makes others, and more of them.
"""

from pathlib import Path

import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import content_type_conformance, not_a_server_error, response_schema_conformance

from tests.cpu.server.process import TIMEOUT_S, ServerProcess, running_server

PATHS = 26
"""Fewer would mean that paths are missing from the document."""


def test_document_describes_errors_as_they_are_sent(server: ServerProcess) -> None:
    document = server.get("/openapi.json").json()
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    assert len(operations) >= PATHS
    sent = server.post("/v1/completions").json()["error"]
    for operation in operations:
        assert "422" not in operation["responses"]
        for status in ("4XX", "5XX"):
            schema = operation["responses"][status]["content"]["application/json"]["schema"]
            assert set(schema["properties"]["error"]["required"]) == sent.keys()


def test_no_request_makes_a_5xx(bytes_dir: Path, tmp_path: Path) -> None:
    # Answers are short, whatever is asked for.
    with running_server(bytes_dir, tmp_path / "log", "--max-model-len", "96") as server:
        document = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
        operations = [found.ok() for found in document.get_all_operations()]
        assert len(operations) >= PATHS
        num_examples = settings().max_examples // 20
        for operation in operations:
            # What takes no body cannot be given a wrong one.
            modes = list(GenerationMode) if len(operation.body) else [GenerationMode.POSITIVE]
            for mode in modes:

                @settings(settings(), max_examples=num_examples, suppress_health_check=list(HealthCheck))
                @given(case=operation.as_strategy(generation_mode=mode))
                def check(case: schemathesis.Case) -> None:
                    checks = [not_a_server_error, content_type_conformance, response_schema_conformance]
                    case.call_and_validate(checks=checks, timeout=TIMEOUT_S)

                check()
