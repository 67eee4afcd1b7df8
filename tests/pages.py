"""What tests of reports share: notebooks made of a few cells, and rendered pages as a reader or a browser sees them."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(
    BROWSER is None, reason="NO BROWSER: pages were not opened; install chromium to run this test"
)
_FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND",
]


def write_notebook(path: Path, cells: list[tuple[str, ...]]) -> Path:
    """A notebook of (kind, source, *tags), kind being "code" or "markdown"."""
    notebook = new_notebook(metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}})
    for kind, source, *tags in cells:
        cell = new_code_cell(source) if kind == "code" else new_markdown_cell(source)
        cell.metadata["tags"] = tags
        notebook.cells.append(cell)
    nbformat.write(notebook, path)
    return path


class Page(HTMLParser):
    """The images of a page, its tables, and its text with and without what is folded."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.images: list[dict[str, str | None]] = []
        self.tables: list[list[list[str]]] = []
        self.open_text = self.folded_text = ""
        self._folds = 0
        self._style = False
        self._in_cell = False
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._style = tag in ("style", "script")
        self._folds += tag == "details" and "open" not in dict(attrs)
        self._in_cell = tag in ("td", "th")
        if tag == "img":
            self.images.append(dict(attrs))
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if self._in_cell:
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self._style = False
        self._in_cell = self._in_cell and tag not in ("td", "th")
        self._folds -= tag == "details" and self._folds > 0

    def handle_data(self, data: str) -> None:
        if self._in_cell:
            self.tables[-1][-1][-1] += data
        if self._folds:
            self.folded_text += data
        elif not self._style:
            self.open_text += data


def open_page(page: Path, folder: Path, width: int) -> tuple[Path, set[str]]:
    """Open a page in headless Chromium with every host unresolvable; returns a picture, and the URLs it asked for."""
    picture, log = folder / "page.png", folder / "net.json"
    _browse(page, folder, f"--window-size={width},2400", f"--log-net-log={log}", f"--screenshot={picture}")
    urls = set(re.findall(r'"url":"(https?://[^"]+)"', log.read_text()))
    own = re.compile(r"https?://[^/]*\b(google|googleapis|gstatic)\.com/")  # the browser's own, not the page's
    return picture, {url for url in urls if not own.match(url)}


def page_after(page: Path, folder: Path, script: str, width: int = 1000) -> Path:
    """What a page has become after its own scripts and ``script`` ran in headless Chromium, as another page."""
    scripted, after = folder / "scripted.html", folder / "after.html"
    scripted.write_text(page.read_text() + f"<script>{script}</script>")
    after.write_text(_browse(scripted, folder, f"--window-size={width},2400", "--dump-dom"))
    return after


def _browse(page: Path, folder: Path, *arguments: str) -> str:
    command = [str(BROWSER), *_FLAGS, f"--user-data-dir={folder / 'profile'}", *arguments, page.as_uri()]
    return subprocess.run(command, capture_output=True, timeout=120, check=True, text=True).stdout
