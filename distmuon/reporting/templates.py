"""The pages that are no notebook's: made from a template, one file each."""

from __future__ import annotations

import os
from pathlib import Path

import jinja2

#: The folder of all templates.
TEMPLATES = Path(__file__).parent / "templates"


def write_page(path: Path, template: str, **facts: object) -> Path:
    """Fill in ``templates/<template>/index.html.j2`` and write it in one piece, so that readers never find half of it.

    Raises:
        jinja2.UndefinedError: the template asks for something that is not among ``facts``.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False}
    content = environment.get_template(f"{template}/index.html.j2").render(**facts)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".part{os.getpid()}")
    part.write_text(content, encoding="utf-8")
    part.replace(path)
    return path
