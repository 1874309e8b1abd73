"""schemathesis asks what the OpenAPI page allows, and what it does not: thousands of requests, none is a 5xx."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from tests.processes import run_folders
from tests.servers import ServerProcess

pytestmark = pytest.mark.soak

EXAMPLES = 200  # a path and phase


@pytest.mark.timeout(1800)
def test_schemathesis_finds_no_server_error(tiny_checkpoint, sharded):
    if importlib.util.find_spec("schemathesis") is None:
        pytest.skip("schemathesis is not installed (pip install 'mgtp[soak]')")
    limits = ("--max-model-len", "64", "--request-timeout", "20")
    with run_folders() as folder:
        server = ServerProcess(folder, sharded(tiny_checkpoint("base"), 1), *limits)
        checks = "not_a_server_error,response_schema_conformance,content_type_conformance,status_code_conformance"
        options = ["--checks", checks, "--max-examples", str(EXAMPLES), "--seed", "1", "--no-color"]
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1700, cwd=folder)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        assert server.http.get("/health").json() == {"status": "ready"}
        asked = server.metric("mgtp_requests_total")
        print(f"{asked:.0f} requests")
        assert asked > 2000
        server.wait_until_idle()
        assert server.stop() == 0
