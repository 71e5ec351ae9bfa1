"""A hook of mkdocs: the pages beside `docs/` become pages of the site, and links between the two lead there.

On the web page of the repository the same links lead to the files.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
BESIDE = {
    "README.md": "index.md",
    "SECURITY.md": "SECURITY.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
}
"""Pages beside `docs/`, with their names on the site."""

LINK = re.compile(r"\[([^\]\[]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that lie beside `docs/`."""
    for name, page in BESIDE.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turn links to files in the repository into links to pages. Links to other files become names."""
    name = page.file.src_uri
    home = ROOT / "docs" / name
    beside = next((each for each, uri in BESIDE.items() if uri == name), None)
    folder = ROOT if beside else home.parent

    def target(match: re.Match[str]) -> str:
        text, link, fragment = match[1], match[2], match[3] or ""
        path = "" if "://" in link else (folder / link).resolve().relative_to(ROOT).as_posix()
        uri = BESIDE.get(path, path.removeprefix("docs/"))
        if not path:
            return match[0]
        if files.get_file_from_path(uri) is None:
            return text if path in text else f"{text} (`{path}`)"
        return f"[{text}]({'../' * name.count('/')}{uri}{fragment})"

    return LINK.sub(target, markdown)
