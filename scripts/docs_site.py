"""Build the documentation site: python scripts/docs_site.py OUT (`make docs` runs it and writes build/docs).

The pages are the README (the front page), CONTRIBUTING, CHANGELOG, docs/, the index of each folder of records, a reference made
from the public docstrings, and every file that one of these links to: Markdown becomes a page, code a page with its lines, anything
else a file beside them. They are laid into OUT-pages as they lie in the repository, Sphinx builds OUT from there (docs/conf.py),
and then the built HTML is read once more. The build fails where a link or an anchor leads nowhere, where Sphinx warns, and where a
page would fetch anything from another host: the site is read offline.

Nothing imports torch or trainstep: docs_reference.py reads the source. Up to Sphinx only the standard library is needed.
"""

import posixpath
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parent.parent
FIRST_PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**/*.md", "results/*/README.md")
GUIDE = ("tour", "map", "answers", "capture", "facts")
"""Pages of docs/ in the order in which they are listed; others follow by name."""
PROJECT = ("log", "decisions/index")
"""Pages of docs/ that are about the project, not about using it."""
LANGUAGES = {".py": "python", ".toml": "toml", ".js": "javascript", ".css": "css"}
"""Files that are shown as a page of code."""

LINK = re.compile(r"`[^`\n]*`|\]\(([^()\s]+)\)")
"""A Markdown link's target; a span of code is matched too, without a group, so that what it holds is no link."""
FETCHING = {"script", "img", "link", "iframe", "source", "video", "audio", "embed", "object", "input", "track"}
"""Tags whose `src`, `href`, `srcset`, `data` or `poster` the browser fetches by itself."""
ADDRESSES = {"src", "href", "srcset", "data", "poster"}
FOREIGN_STYLE = re.compile(r"""(?:url\(|@import)\s*["']?(?:https?:)?//[^)\s"']+""")


def main() -> None:
    """Build the site into the folder named on the command line; exit code 1 if anything in it is wrong."""
    if len(sys.argv) != 2:
        sys.exit("docs_site.py: takes the folder that the site is built into")
    site = Path(sys.argv[1]).resolve()
    pages = site.with_name(site.name + "-pages")
    for folder in (site, pages):
        shutil.rmtree(folder, ignore_errors=True)
    from docs_reference import write_reference  # needs griffe, which the tests of this file do not

    reference = write_reference(ROOT, pages / "reference")
    complaints = lay_pages(ROOT, pages, reference.sources)
    lay_front_page(ROOT, pages, reference.pages)
    command = ["-b", "html", "-c", ROOT / "docs", "-d", site.with_name(site.name + "-doctrees"), "-q", "-W", "-n"]
    built = subprocess.run([sys.executable, "-m", "sphinx", *command, "--keep-going", pages, site], check=False)
    complaints += check_site(site)
    for complaint in complaints:
        print(f"docs: {complaint}", file=sys.stderr)
    if complaints or built.returncode:
        sys.exit(1)
    print(f"{site / 'index.html'}: {len([*site.rglob('*.html')])} pages, every link leads somewhere")


def lay_pages(root: Path, pages: Path, further: Iterable[str] = ()) -> list[str]:
    """Lay the first pages, further files, and all that they link to, into the folder `pages`; the links that lead nowhere."""
    waiting = [*further]
    waiting += [path.relative_to(root).as_posix() for pattern in FIRST_PAGES for path in sorted(root.glob(pattern))]
    laid: set[str] = set()
    complaints: list[str] = []
    while waiting:
        name = waiting.pop()
        if name in laid:
            continue
        laid.add(name)
        source, page = root / name, pages / page_name(root, name)
        page.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            waiting += (listed := listed_files(source, root))
            page.write_text(list_of_files(root, name, listed), encoding="utf-8")
        elif source.suffix == ".md":
            linked: list[str] = []
            page.write_text(with_links(root, name, linked, complaints), encoding="utf-8")
            waiting += linked
        elif source.suffix in LANGUAGES:
            page.write_text(page_of_code(source, name), encoding="utf-8")
        else:
            shutil.copyfile(source, page)
    return complaints


def page_name(root: Path, name: str) -> str:
    """Path of a file's page: the README is the front page, a folder's page lists it, code gets a page of its own."""
    if name == "README.md":
        return "index.md"
    if (root / name).is_dir():
        return f"{name}/index.md"
    return f"{name}.md" if Path(name).suffix in LANGUAGES else name


def with_links(root: Path, name: str, linked: list[str], complaints: list[str]) -> str:
    """A Markdown file's text with its links turned to pages. Adds the files that it links to, and the links to no file."""
    text = (root / name).read_text(encoding="utf-8")
    here = posixpath.dirname(page_name(root, name))

    def turned(link: str, line: int) -> str:
        address, _, anchor = link.partition("#")
        if not address or re.match(r"[a-z]+:", link):
            return link
        target = posixpath.normpath(posixpath.join(posixpath.dirname(name), unquote(address)))
        if target.startswith("../") or not (root / target).exists():
            complaints.append(f"{name}:{line}: {link} leads to no file")
            return link
        if (root / target).is_dir() and (root / target / "README.md").exists():
            target = posixpath.normpath(posixpath.join(target, "README.md"))
        linked.append(target)
        is_page = Path(target).suffix not in LANGUAGES  # a line of code has no anchor on its page
        return posixpath.relpath(page_name(root, target), here or ".") + (f"#{anchor}" if anchor and is_page else "")

    text = turn_links(text, turned)
    if not re.search(r"(?m)^# ", text):  # tables beside records begin further down
        text = f"# {Path(name).stem}\n\n{text}"
    return text


def turn_links(text: str, turned: Callable[[str, int], str]) -> str:
    """The text with each link's target replaced by `turned(target, number of its line)`; code is left alone."""
    lines, fence = [], ""
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        mark = line.strip()[:3]
        if mark in ("```", "~~~") and fence in ("", mark):
            fence = "" if fence else mark
        elif not fence:
            line = LINK.sub(lambda match, n=number: f"]({turned(match[1], n)})" if match[1] else match[0], line)
        lines.append(line)
    return "".join(lines)


def listed_files(folder: Path, root: Path) -> list[str]:
    """Files of a folder that a page of it names."""
    shown = {".md", *LANGUAGES}
    return [path.relative_to(root).as_posix() for path in sorted(folder.iterdir()) if path.suffix in shown]


def list_of_files(root: Path, folder: str, names: list[str]) -> str:
    """Page of a folder that has no README: a link to each file, by its title."""
    links = [f"- [{title(root / name)}]({posixpath.basename(page_name(root, name))})" for name in names]
    return "\n".join([f"# {posixpath.basename(folder).capitalize()}", "", *links, ""])


def title(path: Path) -> str:
    """A Markdown file's first heading; else its name."""
    heading = re.search(r"(?m)^# (.+)$", path.read_text(encoding="utf-8")) if path.suffix == ".md" else None
    return heading[1].strip() if heading else path.name


def page_of_code(source: Path, name: str) -> str:
    """A file of code as a page, with numbered lines."""
    text = source.read_text(encoding="utf-8")
    fence = "`" * max(3, *(len(run) + 1 for run in re.findall(r"`+", text)), 3)
    options = f"{fence}{{code-block}} {LANGUAGES[source.suffix]}\n:linenos:\n\n"
    return f"# {name.removeprefix('src/')}\n\n{options}{text.rstrip()}\n{fence}\n"


def lay_front_page(root: Path, pages: Path, reference: list[str]) -> None:
    """Add to the README's page, the front page, the lists that the sidebar shows."""
    docs = [path.relative_to(root / "docs").with_suffix("").as_posix() for path in (root / "docs").glob("*.md")]
    guide = [name for name in GUIDE if name in docs] + sorted(set(docs) - {*GUIDE, *PROJECT})
    records = sorted(path.parent.name for path in root.glob("results/*/README.md"))
    project = [f"docs/{name}" for name in PROJECT if (pages / "docs" / f"{name}.md").exists()]
    project += [name for name in ("CHANGELOG", "CONTRIBUTING") if (pages / f"{name}.md").exists()]
    with (pages / "index.md").open("a", encoding="utf-8") as front:
        front.write(toctree("Guide", [f"docs/{name}" for name in guide]))
        front.write(toctree("Reference", [f"reference/{name}" for name in reference]))
        front.write(toctree("Records", [f"{name.upper()} <results/{name}/README>" for name in records]))
        front.write(toctree("Project", project))


def toctree(caption: str, names: list[str]) -> str:
    """A list of pages for the sidebar."""
    return "\n".join(["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *names, "```", ""]) if names else ""


@dataclass
class BuiltPage(HTMLParser):
    """What a built page refers to, and what can be referred to in it."""

    anchors: set[str] = field(default_factory=set)
    links: list[tuple[str, str]] = field(default_factory=list)
    """(tag, address)"""

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep the tag's anchors and addresses."""
        for name, value in attrs:
            if value and (name == "id" or (tag == "a" and name == "name")):
                self.anchors.add(value)
            elif value and name in ADDRESSES:
                addresses = [part.split()[0] for part in value.split(",")] if name == "srcset" else [value]
                self.links += [(tag, address) for address in addresses]


def check_site(site: Path) -> list[str]:
    """What is wrong with built HTML: links and anchors that lead nowhere, and whatever is fetched from another host."""
    pages = {}
    for path in sorted(site.rglob("*.html")):
        pages[path] = BuiltPage()
        pages[path].feed(path.read_text(encoding="utf-8"))
    if not pages:
        return [f"{site}: there is no page"]
    complaints = [f"{path.relative_to(site)}: {wrong}" for path in pages for wrong in wrong_links(path, pages, site)]
    for path in sorted(site.rglob("*.css")):
        foreign = FOREIGN_STYLE.findall(path.read_text(encoding="utf-8"))
        complaints += [f"{path.relative_to(site)}: fetches {address}" for address in foreign]
    return complaints


def wrong_links(path: Path, pages: dict[Path, BuiltPage], site: Path) -> Iterator[str]:
    """What is wrong with the links of one built page."""
    for tag, address in pages[path].links:
        parts = urlsplit(address)
        if parts.scheme in ("http", "https") or parts.netloc:
            if tag in FETCHING:
                yield f"<{tag}> fetches {address}"
        elif parts.scheme not in ("data", "mailto"):
            target = Path(posixpath.normpath(path.parent / unquote(parts.path))) if parts.path else path
            if not target.is_relative_to(site):
                yield f"{address} leads out of the site"
            elif not target.is_file():
                yield f"{address} leads to no page"
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                yield f"{address} leads to no such anchor"


if __name__ == "__main__":
    main()
