"""Is a page one file that needs no script and no network? Asked of every page, and of each piece that goes into one."""

from __future__ import annotations

import re
from html.parser import HTMLParser

_STYLE_REFERENCE = re.compile(r"@import[^;]*|url\(\s*['\"]?(?!data:|#)[^)]*\)", re.IGNORECASE)
_FETCHING_ATTRIBUTES = {"src", "poster", "background", "data", "action", "formaction"}
_FETCHING_TAGS = {"script", "iframe", "frame", "object", "embed", "base"}


def outside_references(page: str, *, scripts: bool = False) -> list[str]:
    """What a browser would fetch or run while it shows ``page``: scripts, event handlers, all but ``data:`` URLs.

    A link that the reader may click, or one inside the page, is none. With ``scripts`` nor is a script that stands in
    the page itself.
    """
    finder = _Finder(scripts)
    finder.feed(page)
    finder.close()
    return finder.found


class _Finder(HTMLParser):
    def __init__(self, scripts: bool) -> None:
        super().__init__()
        self._scripts = scripts
        self.found: list[str] = []
        self._in_style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._in_style = tag == "style"
        attributes = {name: (value or "").strip() for name, value in attrs}
        if tag == "script" and self._scripts and "src" not in attributes:
            return
        if tag in _FETCHING_TAGS or (tag == "meta" and attributes.get("http-equiv", "").lower() == "refresh"):
            self.found.append(f"<{tag}> {attributes.get('src') or attributes.get('href') or ''}".rstrip())
            return
        for name, value in attributes.items():
            # An <a> is for the reader to follow; elsewhere (<link>, a drawing's <image>) a browser fetches it.
            is_source = name in _FETCHING_ATTRIBUTES or (name in ("href", "xlink:href") and tag not in ("a", "area"))
            if (is_source and not value.startswith(("data:", "#"))) or value.lower().startswith("javascript:"):
                self.found.append(f"<{tag} {name}> {value}")
            elif name.startswith("on") or name in ("srcset", "ping"):
                self.found.append(f"<{tag} {name}>")
            elif name == "style":
                self.found.extend(_STYLE_REFERENCE.findall(value))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self._in_style = False

    def handle_endtag(self, tag: str) -> None:
        self._in_style = False

    def handle_data(self, data: str) -> None:
        if self._in_style:
            self.found.extend(_STYLE_REFERENCE.findall(data))
