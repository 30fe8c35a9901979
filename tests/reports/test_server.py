"""`nemo-like report --serve`: on the loopback interface, with a token, and up to date."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import pytest

from nemo_like.cli import main
from nemo_like.reports.server import ReportServer
from tests.reports.pages import assert_drawn, in_chromium
from tests.reports.run_directory import metrics_of, write_run


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ReportServer]:
    with ReportServer([write_run(tmp_path)], 0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def get(server: ReportServer, path: str) -> tuple[int, str]:
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.request("GET", path)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_it_listens_on_loopback_and_refuses_requests_without_the_token(
    server: ReportServer,
) -> None:
    assert server.server_address[0] == "127.0.0.1"
    assert server.token in server.address and len(server.token) >= 32
    for query in ("", "?token=", f"?token={server.token[:-1]}", "?token=%C3%A9"):
        for path in ("/", "/content", "/other"):
            status, text = get(server, path + query)
            assert status == 403 and "policy" not in text
    assert get(server, f"/?token={server.token}")[0] == 200
    assert get(server, f"/../config.yaml?token={server.token}")[0] == 404


def test_new_steps_are_new_content(server: ReportServer) -> None:
    path = f"/content?token={server.token}"
    status, text = get(server, path)
    first = json.loads(text)
    assert status == 200 and "in 4 steps" in first["html"]
    assert get(server, f"{path}&state={first['state']}") == (204, "")
    with (server.paths[0] / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 5, "unix_time_s": 1.0, **metrics_of(5)}) + "\n")
    status, text = get(server, f"{path}&state={first['state']}")
    assert status == 200 and "in 5 steps" in json.loads(text)["html"]


def test_a_browser_draws_the_page_and_its_update(server: ReportServer) -> None:
    state, content = server.content()
    # The page does not know its state, so its first request, after five seconds, has an update.
    dom = in_chromium(server.address)
    assert f'data-state="{state}"' in dom
    assert_drawn(dom, len(content.charts))


def test_a_port_in_use_is_one_message(
    server: ReportServer, capsys: pytest.CaptureFixture[str]
) -> None:
    port = str(server.server_port)
    assert main(["report", str(server.paths[0]), "--serve", "--port", port]) == 2
    assert f"127.0.0.1:{port} cannot be opened" in capsys.readouterr().err
