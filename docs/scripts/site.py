"""mkdocs hooks: the README is the home page, and files of the repository that pages link to belong to the site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(\]\()\.\./([^)#\s]+)")
PAGES = {"index.md": "README.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages at the root of the repository, and every file that a page links to outside docs/."""
    for name, source in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        # At the root pages link to docs/x.md and examples/x.py; in docs/ to x.md and ../examples/x.py.
        text = re.sub(r"(\]\()(?!https?:|#|docs/|CONTRIBUTING|CHANGELOG)", r"\1../", text).replace("](docs/", "](")
        files.append(File.generated(config, name, content=text))
    queue = [(page, Path("docs")) for page in files.documentation_pages()]
    added: set[Path] = set()
    for page, folder in queue:
        for target in re.findall(r"\]\(([^)#:\s]+)", page.content_string):
            path = (ROOT / folder / target).resolve().relative_to(ROOT)
            if path.parts[0] == "docs" or path in added or not (ROOT / path).is_file():
                continue
            added.add(path)
            files.append(File.generated(config, path.as_posix(), abs_src_path=str(ROOT / path)))
            if path.suffix == ".md":
                queue.append((files.src_uris[path.as_posix()], path.parent))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links from docs/ to the rest of the repository into links within the site."""
    return LINK.sub(r"\1\2", markdown) if "/" not in page.file.src_uri else markdown
