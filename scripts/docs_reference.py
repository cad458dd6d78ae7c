"""The reference of the documentation site: public names, their signatures and docstrings, as pages of Markdown.

griffe reads the source and runs none of it, so a page is made without torch. What is public: the names in `__all__` of the packages
in PAGES, and the further names there. A name that is gone fails the build.

Docstrings are plain text with code in backticks, so every other mark is escaped: `a * b * c` stays as it is written. What is
indented by four after an empty line is a block of code. A documented name in backticks becomes a link.
"""

import ast
import io
import re
import textwrap
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from griffe import Attribute, Class, Function, Module, Object

    Members: TypeAlias = dict[str, Object]

LONGEST_SIGNATURE = 88
MARKS = re.compile(r"([\\*_<>\[\]$#|~{}])|^([%+=-])", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class ReferencePage:
    """One page: a package's docstring, then what it exports."""

    package: str
    title: str
    further: tuple[str, ...] = ()
    """Public names that one module below the package `below` defines, and that are not exported."""
    below: str = ""

    @property
    def name(self) -> str:
        """Name of its file."""
        return self.package.rpartition(".")[2]


PAGES = (
    ReferencePage(
        package="trainstep", title="Attention and AdamW", further=("AdamW", "register"), below="trainstep.ops"
    ),
    ReferencePage(package="trainstep.parallel", title="Parallel strategies"),
    ReferencePage(package="trainstep.capture", title="Captured steps"),
    ReferencePage(
        package="trainstep.records",
        title="Records",
        further=(
            *("Record", "Samples", "Environment", "Failure", "Store"),
            *("match_records", "compare_records", "compare_samples", "Matches", "Comparison"),
        ),
        below="trainstep.records",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A public name, and what it stands for."""

    name: str
    imported_from: str
    target: "Class | Function"


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What was written: names of the pages in order, and the files of source that they link to."""

    pages: list[str]
    sources: list[str]


def write_reference(root: Path, folder: Path) -> Reference:
    """Write every page into the folder. ValueError for a public name that is not in the source, or has no docstring."""
    import griffe

    package = griffe.load("trainstep", search_paths=[root / "src"], allow_inspection=False)
    entries = {page: entries_of(page, package) for page in PAGES}
    links = {entry.name: f"{page.name}.md#{entry.name.lower()}" for page in PAGES for entry in entries[page]}
    folder.mkdir(parents=True, exist_ok=True)
    sources = []
    for page in PAGES:
        writer = PageWriter(root, page, links, {entry.target.path for entry in entries[page]})
        (folder / f"{page.name}.md").write_text(writer.page(at(package, page.package), entries[page]), encoding="utf-8")
        sources += writer.sources
    return Reference(pages=[page.name for page in PAGES], sources=sorted(set(sources)))


def entries_of(page: ReferencePage, package: "Module") -> list[Entry]:
    """The names on a page, in their order."""
    exporting = at(package, page.package)
    entries = []
    for name in [str(name) for name in exporting.exports or []]:
        target = exporting.members[name]
        entries.append(Entry(name=name, imported_from=page.package, target=target.final_target))
    for name in page.further:
        found = list(defined_below(at(package, page.below), name))
        if len(found) != 1:
            raise ValueError(f"{name}: {len(found)} classes or functions below {page.below} have this name; mend PAGES")
        entries.append(Entry(name=name, imported_from=found[0].parent.path, target=found[0]))
    return entries


def at(package: "Module", dotted: str) -> "Module":
    """The module of this name."""
    for part in dotted.split(".")[1:]:
        package = package.modules[part]
    return package


def defined_below(module: "Module", name: str) -> Iterator["Class | Function"]:
    """Classes and functions of this name that a module, or one below it, defines at its top level."""
    member = module.members.get(name)
    if member is not None and not member.is_alias and (member.is_class or member.is_function):
        yield member
    for below in module.modules.values():
        if not below.is_alias:
            yield from defined_below(below, name)


@dataclass
class PageWriter:
    """Writes one page, and keeps the files of source that it links to."""

    root: Path
    of: ReferencePage
    links: dict[str, str]
    """Public name -> address of its documentation."""
    here: set[str]
    """Dotted paths of what is documented on this page."""
    sources: list[str] = field(default_factory=list)

    def page(self, package: "Module", entries: list[Entry]) -> str:
        """The page's text."""
        parts = [f"# {self.of.title}", self.text(package)]
        for entry in entries:
            parts += [f"## {entry.name}", *self.entry(entry)]
        return "\n\n".join(parts) + "\n"

    def entry(self, entry: Entry) -> Iterator[str]:
        """A public name: how it is called, what it does, where its source is, its fields and methods."""
        target = entry.target
        yield code(f"from {entry.imported_from} import {entry.name}")
        if target.name != entry.name and target.name in self.links:
            yield f"Another name of {self.linked(target.name)}. {self.source_of(target)}"
            return
        yield signature_of(target.signature(name=entry.name))
        yield self.text(target)
        if target.is_class:
            yield from self.members(entry.name, target)
        yield self.source_of(target)

    def source_of(self, target: "Object") -> str:
        """A link to the file that defines it."""
        path = target.filepath.relative_to(self.root).as_posix()
        self.sources.append(path)
        return f"Source: [{path.removeprefix('src/')}](../{path}.md)"

    def members(self, name: str, target: "Class") -> Iterator[str]:
        """Fields and methods of a class in full; in a line each what it inherits of classes that are not on this page."""
        ancestors = [ancestor for ancestor in target.mro() if ancestor.path.startswith("trainstep.")]
        if known := [ancestor.name for ancestor in ancestors if ancestor.path in self.here]:
            yield f"A subclass of {', '.join(map(self.linked, known))}."
        own = public_members(target)
        if fields := [found for found in own.values() if found.is_attribute and is_for_callers(found, target)]:
            yield "\n".join(self.field(found) for found in fields)
        for key, found in own.items():
            described = next((each for each in [found, *inherited(ancestors, key)] if each.docstring), None)
            if found.is_function and described is not None:
                yield f"### {name}.{key}"
                yield signature_of(found.signature())
                yield self.text(described)
        others: Members = {}
        for ancestor in reversed([each for each in ancestors if each.path not in self.here]):
            others |= public_members(ancestor)
        if lines := [self.in_a_line(found) for key, found in others.items() if key not in own and found.docstring]:
            yield f"{name} also has:"
            yield "\n".join(lines)

    def in_a_line(self, found: "Object") -> str:
        """A member as an item of a list: how it is called, and its docstring's first paragraph."""
        called = found.signature() if found.is_function else found.name
        return (
            f"- `{called}`: " + textwrap.indent(self.escaped(found.docstring.value.partition("\n\n")[0]), "  ").strip()
        )

    def field(self, found: "Attribute") -> str:
        """An attribute as an item of a list."""
        of_type = f": `{found.annotation}`" if found.annotation is not None else ""
        text = textwrap.indent(self.text(found), "  ").strip() if found.docstring else ""
        return f"- `{found.name}`{of_type}{'. ' if text else ''}{text}"

    def text(self, target: "Object") -> str:
        """Its docstring as Markdown."""
        if target.docstring is None:
            raise ValueError(f"{target.path}: is public and has no docstring")
        return "\n\n".join(self.blocks(target.docstring.value))

    def blocks(self, docstring: str) -> Iterator[str]:
        """Paragraphs, lists and blocks of code."""
        parts: list[str] = []
        for part in re.split(r"\n[ \t]*\n", docstring.strip("\n")):
            if parts and part.startswith("    ") and parts[-1].startswith("    "):
                parts[-1] += f"\n\n{part}"  # one block of code with an empty line in it
            else:
                parts.append(part)
        for part in parts:
            yield code(textwrap.dedent(part)) if part.startswith("    ") else self.escaped(part)

    def escaped(self, text: str) -> str:
        """Text whose only marks are code in backticks, and dashes of a list."""
        parts = re.split(r"(`[^`]*`)", text)
        for index, part in enumerate(parts):
            if index % 2:
                parts[index] = self.linked(part.strip("`")) if part.strip("`") in self.links else part
            else:
                parts[index] = MARKS.sub(lambda mark: f"\\{mark[0]}", part)
        return re.sub(r"(?m)^\\- ", "- ", "".join(parts))

    def linked(self, name: str) -> str:
        """A public name as a link to its documentation."""
        return f"[`{name}`]({self.links[name]})"


def public_members(owner: "Class") -> "Members":
    """What a class itself defines for callers."""
    return {key: found for key, found in owner.members.items() if not key.startswith("_") and not found.is_alias}


def is_for_callers(found: "Attribute", owner: "Class") -> bool:
    """Whether an attribute has a docstring, or is a field of a dataclass."""
    return bool(found.docstring) or ("dataclass" in owner.labels and found.annotation is not None)


def inherited(ancestors: list["Class"], name: str) -> list["Object"]:
    """What the ancestors have under a name, the nearest first."""
    return [ancestor.members[name] for ancestor in ancestors if name in ancestor.members]


def code(text: str, language: str = "") -> str:
    """A block of code: Python where no language is given and it can be parsed as such."""
    if not language:
        try:
            ast.parse(text)
            language = "python"
        except SyntaxError:
            language = "text"
    return f"```{language}\n{text.rstrip()}\n```"


def signature_of(signature: str) -> str:
    """A signature as a block of code, one argument a line where it is long."""
    if len(signature) <= LONGEST_SIGNATURE:
        return code(signature, "python")
    lines, depth, begin = [], 0, signature.index("(") + 1
    for token in tokenize.generate_tokens(io.StringIO(signature).readline):
        depth += (token.string in "([{") - (token.string in ")]}") if token.type == tokenize.OP else 0
        if (token.string == "," and depth == 1) or (token.string == ")" and depth == 0):
            lines.append(f"    {signature[begin : token.start[1]].strip()},")
            begin = token.end[1]
        if token.string == ")" and depth == 0:
            break
    return code("\n".join([signature[: signature.index("(") + 1], *lines, f"){signature[begin:]}"]), "python")
