"""Files are downloaded once and used only if their checksum is right; networks of the local folder."""

import hashlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from experiments.published_files import fetch, load_network
from otpdag.errors import DataError

CONTENT = b"a published file"
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def site():
    """A server on this machine that publishes /a/file.txt, and what it was asked for."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            found = self.path == "/a/file.txt"
            self.send_response(200 if found else 404)
            self.end_headers()
            self.wfile.write(CONTENT if found else b"")

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_file_is_downloaded_once(site, tmp_path):
    address, asked = site
    path = fetch(f"{address}/a/file.txt", SHA256, tmp_path / "new")
    assert path == tmp_path / "new" / "file.txt"
    assert path.read_bytes() == CONTENT
    assert fetch(f"{address}/a/file.txt", SHA256.upper(), tmp_path / "new") == path
    assert asked == ["/a/file.txt"]


def test_a_wrong_checksum_leaves_nothing_behind(site, tmp_path):
    address, _ = site
    with pytest.raises(DataError, match=r"what http://.*file\.txt sent is not the published file"):
        fetch(f"{address}/a/file.txt", "0" * 64, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_changed_file_is_refused_without_asking_for_it(site, tmp_path):
    address, asked = site
    (tmp_path / "file.txt").write_text("changed")
    with pytest.raises(DataError, match=r"file\.txt is not the published file.*remove it to download it anew"):
        fetch(f"{address}/a/file.txt", SHA256, tmp_path)
    assert asked == []


def test_an_unreachable_file_says_where_to_put_it(site, tmp_path):
    address, _ = site
    with pytest.raises(DataError, match=r"\(Not Found\); fetch it by other means and put it at .*other\.txt"):
        fetch(f"{address}/other.txt", SHA256, tmp_path)
    with pytest.raises(DataError, match=r"cannot download http://127\.0\.0\.1:9/x\.txt \(.*put it at .*x\.txt"):
        fetch("http://127.0.0.1:9/x.txt", SHA256, tmp_path)


def test_other_schemes_are_refused(tmp_path):
    with pytest.raises(DataError, match="must begin with http:// or https://; got 'file:///etc/hosts'"):
        fetch("file:///etc/hosts", SHA256, tmp_path)


def test_load_network_refuses_unknown_missing_and_changed_files(tmp_path, monkeypatch):
    monkeypatch.delenv("OTPDAG_DATA", raising=False)
    with pytest.raises(DataError, match=r"must be one of alarm, asia, .*; got 'chess'"):
        load_network("chess")
    with pytest.raises(DataError, match="set the environment variable OTPDAG_DATA"):
        load_network("asia")
    with pytest.raises(DataError, match=r"asia\.bif is missing; the networks are published at"):
        load_network("asia", tmp_path)
    (tmp_path / "bif").mkdir()
    (tmp_path / "bif" / "asia.bif").write_text("network asia {}")
    with pytest.raises(DataError, match="not the published file"):
        load_network("asia", tmp_path)
